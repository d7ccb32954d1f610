// One question: a name, or whether something is meant.

import { byId } from "./dom.js";

/** What was answered, "" where nothing but a yes is asked for, null for no. */
export function askFor(title, { value = null, reason = "" } = {}) {
  const [dialog, input] = [byId("ask-dialog"), byId("ask-input")];
  byId("ask-title").textContent = title;
  byId("ask-reason").textContent = reason;
  input.hidden = value === null;
  input.value = value ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  (value === null ? byId("ask-cancel") : input).focus();
  input.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? input.value.trim() : null), { once: true });
  });
}

export function offerAnswers() {
  const answer = (value) => () => byId("ask-dialog").close(value);
  byId("ask-cancel").addEventListener("click", answer(""));
  byId("ask-yes").addEventListener("click", answer("yes"));
  byId("ask-input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault(); // it would reach the button that the focus goes back to
    byId("ask-yes").click();
  });
}
