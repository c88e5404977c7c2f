// What to try first: each example fills the form and runs.

export const EXAMPLES = [
  { title: "Continue a text", text: "The history of the city" },
  { title: "Fill holes", text: "The [MASK:2] was built in [MASK:1] by the [MASK:3] army." },
  { title: "Write the middle", text: "The king lost the war. [MASK:32] So peace returned to the kingdom." },
  { title: "Change its mind", text: "", sampler: "remdm-loop" },
  { title: "Surest words first", text: "The planet", sampler: "confidence" },
  { title: "Race", text: "", race: true },
];

/** Buttons for those that the model can do, all while there is none; `onPick(example)`. */
export function drawChips(root, model, canRace, onPick) {
  const able = EXAMPLES.filter((e) => (!e.sampler || !model || model.samplers.includes(e.sampler)) && (!e.race || canRace));
  root.replaceChildren(...able.map((example) => {
    const chip = Object.assign(document.createElement("button"), { type: "button", textContent: example.title, disabled: !model });
    chip.addEventListener("click", () => onPick(example));
    return chip;
  }));
}
