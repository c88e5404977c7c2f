// Run inside the page by test_page.py: a tape of 1,024 tokens and 500 frames, against a plain replay.
async () => {
    const { makeTape, append, finish, canvasAt } = await import("/static/frames.js");
    const { makeCanvas } = await import("/static/canvas.js");
    let seed = 1;
    const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
    const L = 1024, none = Array(L).fill(null);
    const tape = makeTape({ tokens: none, texts: none, fixed: [], special: [], steps: 500, sampler: "remdm-loop" });
    const row = [...none], history = [[...row]];
    for (let step = 1; step <= 500; step++) {
        const set = [], unset = [];
        for (let j = 0; j < 8; j++) {
            const i = random(L);
            if (row[i] !== null && random(3) === 0) { if (!set.some(([k]) => k === i)) { row[i] = null; unset.push(i); } }
            else if (!unset.includes(i)) { row[i] = random(5000); set.push([i, row[i], " w" + row[i]]); }
        }
        const anchors = step % 16 === 1
            ? row.flatMap((id, i) => (id === null ? [[i, 7, " guess", random(100) / 100]] : [])) : [];
        append(tape, { step, nfe: step, masked: row.filter((id) => id === null).length / L, set, unset, anchors });
        history.push([...row]);
    }
    const end = row.map((id) => id ?? 1);
    finish(tape, { tokens: end, texts: end.map((id) => " w" + id), nfe: 500 });
    history.push(end);
    const wrong = history.map((ids, k) => (String(canvasAt(tape, k).ids) === String(ids) ? null : k)).filter((k) => k !== null);
    const root = document.createElement("p");
    root.className = "passage canvas";
    document.body.append(root);
    const canvas = makeCanvas(root, () => {});
    canvas.reset(tape);
    const times = [];
    for (let i = 0; i < 60; i++) {
        const begin = performance.now();
        canvas.show(random(502));
        root.getBoundingClientRect();  // layout is part of the cost
        times.push(performance.now() - begin);
    }
    const look = () => [...root.querySelectorAll(".cell")].map((span) => span.innerHTML);
    canvas.show(300);
    const before = look();
    const touched = new Set();
    const note = (m) => { const cell = m.target.closest(".cell"); if (cell) touched.add(cell); }; // not a line's width
    const observer = new MutationObserver((all) => all.forEach((m) => note(m)));
    observer.observe(root, { subtree: true, childList: true, attributes: true, characterData: true });
    canvas.show(301);
    for (const m of observer.takeRecords()) note(m);
    const after = look();
    const changed = after.filter((html, i) => html !== before[i]).length;
    return { wrong, changed, touched: touched.size, median: times.sort((a, b) => a - b)[30] };
}
