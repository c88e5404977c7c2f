// Run inside the page by test_page.py: laws of the modules that do not touch the document, name -> holds.
async () => {
    const { makeParser } = await import("/static/sse.js");
    const link = await import("/static/link.js");
    const t = await import("/static/template.js");
    const { thin, ticks, tickStep } = await import("/static/plot.js");
    const { DEFAULTS, bodyFor, constraint, unknownName } = await import("/static/state.js");
    const { pace } = await import("/static/player.js");
    const { expectedFrames, makeTape, totalSteps } = await import("/static/frames.js");
    const { level, timeLevel } = await import("/static/cells.js");
    const { mended, nearHoles } = await import("/static/holes.js");
    const { plain } = await import("/static/api.js");
    const { difference } = await import("/static/lane.js");
    const { fillings, lettersOf, rangeBetween } = await import("/static/alternatives.js");
    const { bundle } = await import("/static/bundle.js");
    const { templateTexts } = await import("/static/typed.js");
    const frames = await import("/static/frames.js");
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
        "a link holds the text, the holes and the template": (() => {
            const { settings: found } = link.decode(link.encode({ ...settings, tokens, template: "x[MASK:2]" }));
            return found.template === "x[MASK:2]" && found.text === settings.text && same(found.tokens, tokens);
        })(),
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
        "holes must match": same(constraint("/[0-9]{4}/"), { regex: "[0-9]{4}" }) && same(constraint("yes, no"), { choices: ["yes", "no"] })
            && same(constraint(" "), {}) && bodyFor({ ...DEFAULTS, match: "/a/" }).regex === "a",
        "names the server does not have": unknownName({ model: "a", sampler: "s" }, [{ id: "a", samplers: ["s"] }]) === ""
            && unknownName({ model: "b", sampler: "s" }, [{ id: "a", samplers: ["s"] }]) === "the model b"
            && unknownName({ model: "a", sampler: "t" }, [{ id: "a", samplers: ["s"] }]) === "the sampler t for a",
        "ticks": same(ticks(64), [0, 20, 40, 60]) && same(ticks(1), [0, 1]) && tickStep(100) === 20,
        "thinning keeps the last": thin(Array.from({ length: 1000 }, (_, i) => i)).at(-1) === 999,
        "frames to expect": (() => {
            const start = { tokens: [1, null, null], texts: [], fixed: [], steps: 8, steps_matter: true, writes_once: true };
            const remasks = { ...start, writes_once: false }, oneByOne = { ...start, steps_matter: false };
            return same([start, remasks, oneByOne].map(expectedFrames), [2, 8, 2])
                && same([start, remasks, oneByOne].map((s) => totalSteps(makeTape(s))), [8, 8, 2])
                && totalSteps({ ...makeTape({ ...start, block_length: 2 }), frames: [{ step: 3 }], end: {} }) === 3;
        })(),
        "pace": pace(1) === 140 && pace(100000) === 16 && pace(90, 2) === 50,
        "confidence": level(0) === 0 && level(0.55) === 5 && level(1) === 9,
        "time": timeLevel(1, 64) === 0 && timeLevel(64, 64) === 6 && timeLevel(0, 64) === 0,
        "near holes": same(nearHoles("[mask:3] [MASK:2] [MASK:] [ Mask ] [MASK:4").map((h) => h.meant), ["[MASK:3]", "[MASK]", "[MASK]", "[MASK:4]"])
            && nearHoles("[masked] [MASK]").length === 0 && mended("a [mask:3], [MASK:] b") === "a [MASK:3], [MASK] b",
        "template as the canvas shows it": same(templateTexts("The [MASK:2] sat."), ["The", " ", null, null, " sat."]),
        "messages without names of settings": plain("steps=9, allowed are 4 (serve.max_steps)") === "Steps=9, allowed are 4."
            && plain("the cost n x length x steps is 9, allowed are 4 (length 2 times serve.max_steps=2, or times serve.max_n=1 and the default steps)") === "The cost n x length x steps is 9, allowed are 4."
            && plain("sampling.sampler='x' (a) cannot") === "Sampler='x' (a) cannot.",
        "difference": same(difference([1, 2, 3, 4], [1, 9, 8, 3, 4]).map((d) => [...d]), [[1], [1, 2]]),
        "a word without its marks": same(lettersOf([0, 4], [" (", "ca", "t", ")."]), [1, 3]) && lettersOf([0, 1], [","]) === null,
        "fillings": (() => {
            const choice = (...texts) => ({ texts });
            const found = fillings([choice("", "a", " b", " c"), choice("", "a", " d", " c"), choice("", "a", " d", " c"), choice("x")], "a", " c", " b");
            return same(found.map((f) => [f.name, f.count, f.range]), [["d", 2, [2, 3]]]) && same(rangeBetween(["ab", "cd", "e"], "ab", "e"), [1, 2]);
        })(),
        "modules in one script": await (async () => {
            const sources = { "a.js": 'import { b } from "./b.js";\nexport const a = b(1);\nglobalThis.bundled = a;\n', "b.js": "export function b(x) { return x + 1; }\n" };
            const code = await bundle("a.js", async (name) => sources[name]);
            return code.indexOf('modules["b.js"] = ') < code.indexOf('const { b } = modules["b.js"];') && !/^(im|ex)port/m.test(code);
        })(),
        "what came first": (() => {
            const tape = makeTape({ tokens: [null, null, null], texts: [null, null, null], fixed: [], special: [], steps: 3, steps_matter: true });
            frames.append(tape, { step: 1, set: [[0, 1, " un"], [2, 3, " it"]], unset: [], nfe: 1, masked: 0.3 });
            frames.append(tape, { step: 2, set: [], unset: [2], nfe: 2, masked: 0.6 });
            frames.append(tape, { step: 3, set: [[1, 2, "do"], [2, 4, " all"]], unset: [], nfe: 3, masked: 0 });
            tape.marked = new Set([0, 1]);
            const again = frames.fromEvents(JSON.parse(JSON.stringify(frames.toEvents(tape))));
            return same(frames.settledSteps(tape), [3, 3, 3]) && same(frames.meanSteps(tape), [3, 3]) && same(again.tip, tape.tip);
        })(),
        "guesses are about the canvas before their frame": (() => {
            const tape = makeTape({ tokens: [null, null], texts: [null, null], fixed: [], special: [], steps: 2, steps_matter: true });
            frames.append(tape, { step: 1, set: [[0, 1, " a"]], unset: [], anchors: [[0, 1, " a", 0.9], [1, 2, " b", 0.5]], nfe: 1, masked: 0.5 });
            return same([...frames.stateAt(tape, 0).guesses.keys()], [0, 1]) && same([...frames.stateAt(tape, 1).guesses.keys()], [1]);
        })(),
    };
}
