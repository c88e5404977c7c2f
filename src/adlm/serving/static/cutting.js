// Holes cut into a text by hand: the bar above the text, the editor in its place, and what is asked for afterwards.
import { makeEditor } from "./editor.js";
import { countHoles, indexAfter, itemsOf, toTemplate, toTokens, toggle } from "./template.js";
import { typedItems } from "./typed.js";

const $ = (id) => document.getElementById(id);

/** page: {lanes(), form, player, notice, isRunning(), typed()}; `typed()`: a text that was typed and not run yet, or "". */
export function makeCutting(page) {
  let editing = null; // {lane, cutter, typed} while holes are cut

  /** Cut the word at a position of a lane's canvas. */
  function cutAt(lane, position) {
    if (page.isRunning()) return;
    const { ids, texts } = lane.state();
    const items = itemsOf(ids, texts);
    let at = 0;
    const index = items.findIndex((item) => (at += item.kind === "hole" ? item.length : item.ids.length) > position);
    const cut = toggle(items, index);
    open(lane, cut, lane.recorded, indexAfter(items, cut, index));
  }

  /** The text shown, at any step; or what was typed, when that is newer. */
  async function cut() {
    if (page.isRunning() || editing) return;
    const text = page.typed(), [lane] = page.lanes();
    if (text) {
      try {
        open(lane, await typedItems(page.form.read().model, text), true);
      } catch (error) {
        page.notice.show(error);
      }
    } else if (!lane.empty) {
      page.player.pause();
      const { ids, texts } = lane.state();
      open(lane, itemsOf(ids, texts), lane.recorded);
    } else page.notice.tell("There is no text yet: generate one, or type one, then click words into holes.");
  }

  /** `asText`: the tokens are not this server's, or not known: what is filled is the text. */
  function open(lane, items, asText, at) {
    leave();
    page.notice.clear();
    page.player.pause();
    editing = { lane, asText, cutter: (lane.cutter ??= makeEditor(lane.editor, counted)) };
    lane.canvas.hidden = true;
    lane.editor.hidden = false;
    $("holes").hidden = false;
    editing.cutter.open(items, at);
  }

  function leave() {
    if (!editing) return;
    editing.lane.canvas.hidden = false;
    editing.lane.editor.hidden = true;
    editing = null;
    $("holes").hidden = true;
  }

  function counted(items) {
    const { holes, masks } = countHoles(items);
    $("infill").disabled = holes === 0;
    $("holecount").textContent = holes
      ? `${holes} hole${holes > 1 ? "s" : ""}, ${masks} mask${masks > 1 ? "s" : ""} to fill.`
      : "Click a word to make a hole.";
  }

  /** {tokens, template} of the holes being cut, or null. */
  function holes() {
    if (!editing) return null;
    const items = editing.cutter.items();
    if (!countHoles(items).holes) return null;
    return { tokens: editing.asText ? null : toTokens(items), template: toTemplate(items) };
  }

  return { cut, cutAt, leave, holes, isOpen: () => Boolean(editing) };
}
