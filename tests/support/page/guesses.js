// Run inside the page by test_page.py: which guesses are kept, and how they stand in live and in replayed canvases.
async () => {
    const { makeLane } = await import("/static/lane.js");
    const { loadRanks } = await import("/static/words.js");
    const ranks = await loadRanks();
    const none = Array(4).fill(null);
    const start = { model: "m", sampler: "s", seed: 1, steps: 4, steps_matter: true, writes_once: true, tokens: none, texts: none, fixed: [], special: [] };
    const anchors = [[0, 1, " Atlantic", 0.9], [1, 2, " the", 0.95], [2, 3, "ing", 0.8], [3, 4, " river", 0.5], [1, 5, "\n", 0.6], [2, 6, ",", 0.9]];
    const lane = makeLane(7, () => {}, () => ranks);
    document.getElementById("lanes").append(lane.root);
    lane.receive("start", start);
    lane.receive("frame", { step: 1, nfe: 1, masked: 0.75, set: [[1, 9, " of"]], unset: [], anchors });
    const kept = lane.tape.frames[0].anchors.map(([, , text]) => text);
    lane.show(0);
    const holes = () => [...lane.root.querySelectorAll(".hole.guess")];
    const live = holes().map((hole) => hole.textContent);
    const clipped = holes().filter((hole) => hole.scrollWidth > hole.clientWidth + 1).length;
    const texts = [" sea", " of", " a", " basin"];
    lane.receive("end", { tokens: [8, 9, 10, 11], texts, text: texts.join(""), nfe: 2, seconds: 1 });
    lane.show(0);
    const [long, fits] = holes();
    const result = { kept, live, clipped, replayed: {
        fits: fits.querySelector("em").textContent, long: long.querySelector("em")?.textContent ?? "",
        colour: getComputedStyle(long).backgroundColor !== getComputedStyle(lane.root.querySelector(".hole:not(.guess)")).backgroundColor,
    } };
    lane.root.remove();
    return result;
}
