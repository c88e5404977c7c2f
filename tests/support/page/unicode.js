// Run inside the page by test_page.py: a character of three tokens that come one by one, as the server sends them.
async () => {
    const { makeLane } = await import("/static/lane.js");
    const lane = makeLane(8, () => {}, () => new Map());
    document.getElementById("lanes").append(lane.root);
    const start = { model: "m", sampler: "s", seed: 1, steps: 3, steps_matter: true, writes_once: true, tokens: [null, null], texts: [null, null], fixed: [], special: [] };
    const read = () => [...lane.root.querySelectorAll(".cell")].map((c) => (c.querySelector(".hole:not(.part)") ? "_" : c.textContent.trim())).join("").replaceAll("_", "").trim();
    const seen = [];
    lane.receive("start", start);
    lane.show(0);
    seen.push(lane.root.querySelectorAll(".hole").length === 2 ? "_" : "?");
    lane.receive("frame", { step: 1, nfe: 1, masked: 0.5, set: [[0, 1, ""]], unset: [], anchors: [] });
    lane.show(1);
    seen.push(read());
    lane.receive("frame", { step: 2, nfe: 2, masked: 0, set: [[1, 2, "東"]], unset: [], anchors: [] });
    lane.show(2);
    seen.push(read());
    lane.receive("end", { tokens: [1, 2], texts: ["", "東"], text: "東", nfe: 2, seconds: 1 });
    lane.show(2);
    seen.push(read(), lane.root.querySelector(".canvas").textContent);
    lane.root.remove();
    return seen;
}
