// Run inside the page by test_page.py: laws of the modules that do not touch the document, name -> holds.
async () => {
    const { makeParser } = await import("/static/sse.js");
    const link = await import("/static/link.js");
    const t = await import("/static/template.js");
    const { thin, ticks, tickStep } = await import("/static/plot.js");
    const { DEFAULTS, bodyFor, unknownName } = await import("/static/state.js");
    const { pace } = await import("/static/player.js");
    const { expectedFrames, makeTape, totalSteps } = await import("/static/frames.js");
    const { level, maskShape, rareClass } = await import("/static/cells.js");
    const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

    const stream = ': hello\r\n\r\nevent: frame\r\ndata: {"a":\ndata: 1}\n\ndata: x\r\r event: odd\n\nevent: end\ndata: 2\n\n';
    const expected = [["frame", '{"a":\n1}'], ["message", "x"], ["end", "2"]];
    const parse = (size) => {
        const parser = makeParser(), found = [];
        for (let i = 0; i < stream.length; i += size) found.push(...parser.push(stream.slice(i, i + size)));
        return found.map((e) => [e.event, e.data]);
    };
    const sizes = Array.from({ length: stream.length }, (_, i) => i + 1);

    const settings = { ...DEFAULTS, model: "a/b &", sampler: "mdlm", seed: 7, text: "x=1&y #", compare: true,
        model2: "c", sampler2: "dfm", steps2: 9, top_p: 0.5, required: "é, ü" };
    const tokens = [5, null, null, 7, null];
    const items = t.itemsOf([1, 2, 3, 4, 5, 6], ["", "un", "do", " it", "\n", "now"]);
    const cut = t.toggle(t.toggle(items, 1), 2);
    return {
        "events in pieces of any size": sizes.every((size) => same(parse(size), expected)),
        "link and back": same({ ...DEFAULTS, ...link.decode("#" + link.encode(settings)).settings }, settings),
        "link to another model": link.decode(link.encode({ ...settings, tokens, template: "x[MASK:2]" })).settings.template === "x[MASK:2]"
            && !("template" in link.decode(link.encode({ ...settings, tokens, template: "x", model2: settings.model })).settings),
        "link asks to run": link.decode(link.encode(settings, true)).run && !link.decode(link.encode(settings)).run,
        "tokens in a link": same(link.unpackTokens(link.packTokens(tokens)), tokens) && link.packTokens(tokens) === "5,_2,7,_1",
        "forged links": link.unpackTokens("_999999999") === null && link.unpackTokens("1,x") === null
            && same(link.decode("#steps=many&evil=1").settings, {}),
        "words": same(items.map((i) => i.kind + i.texts.join("")), ["still", "wordundo", "word it", "still\n", "wordnow"]),
        "neighbouring holes are one": same(t.countHoles(cut), { holes: 1, masks: 3 }) && same(t.toTokens(cut), [1, null, null, null, 5, 6]),
        "a hole is undone": same(t.toggle(cut, 1), items),
        "template text": t.toTemplate(cut) === "[MASK:3]\nnow",
        "masks of the model stay": same(t.toggle(t.itemsOf([null, null], [null, null]), 0), t.itemsOf([null, null], [null, null])),
        "body: prompt": same(bodyFor({ ...DEFAULTS, text: "a", length: 9 }).prompt, "a") && bodyFor({ ...DEFAULTS, text: "a", length: 9 }).length === 9,
        "body: template has no length": !("length" in bodyFor({ ...DEFAULTS, text: "a[MASK:2]", length: 9 })),
        "body: tokens only for their own model": same(bodyFor({ ...settings, tokens, template: "x[MASK:2]" }).tokens, tokens)
            && bodyFor({ ...settings, tokens, template: "x[MASK:2]" }, 1).template === "x[MASK:2]",
        "names the server does not have": unknownName({ model: "a", sampler: "s" }, [{ id: "a", samplers: ["s"] }]) === ""
            && unknownName({ model: "b", sampler: "s" }, [{ id: "a", samplers: ["s"] }]) === "the model b"
            && unknownName({ model: "a", sampler: "t" }, [{ id: "a", samplers: ["s"] }]) === "the sampler t for a",
        "ticks": same(ticks(64), [0, 20, 40, 60]) && same(ticks(1), [0, 1]) && tickStep(100) === 20,
        "thinning keeps the last": thin(Array.from({ length: 1000 }, (_, i) => i)).at(-1) === 999,
        "frames to expect": (() => {
            const start = { tokens: [1, null, null], texts: [], fixed: [], steps: 8, steps_matter: true, writes_once: true };
            const remasks = { ...start, writes_once: false }, oneByOne = { ...start, steps_matter: false };
            return same([start, remasks, oneByOne].map(expectedFrames), [2, 8, 2])
                && same([start, remasks, oneByOne].map((s) => totalSteps(makeTape(s))), [8, 8, 2]);
        })(),
        "pace": pace(1) === 140 && pace(100000) === 16 && pace(90, 2) === 50,
        "confidence": level(0) === 0 && level(0.55) === 5 && level(1) === 9,
        "a mask takes the room of its token": same(maskShape(" the"), { before: 1, width: 3, tail: "" }) && maskShape("\n  ").tail === "\n  ",
        "rare": rareClass(" cat", 1, 5) === "rare r1" && rareClass(" cat", 6, 5) === "" && rareClass(",", 1, 5) === "",
    };
}
