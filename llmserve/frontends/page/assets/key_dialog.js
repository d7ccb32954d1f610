// The API key: asked for when the server wants one, kept for this tab.

import { apiKey } from "./api.js";
import { byId } from "./dom.js";

/** `changed` is called with every new key. */
export function offerKeys(changed) {
  const [dialog, input, field] = [byId("key-dialog"), byId("key-input"), byId("api-key")];
  field.value = apiKey.get();
  const use = (key) => {
    apiKey.set(key.trim());
    field.value = key.trim();
    changed();
  };
  field.addEventListener("change", () => use(field.value));
  byId("key-use").addEventListener("click", () => {
    dialog.close();
    use(input.value);
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    byId("key-use").click();
  });
}

/** `reason`: why the server has refused a key. */
export function askForKey(reason) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-reason").textContent = apiKey.get() ? reason : "";
  byId("key-input").value = "";
  dialog.showModal();
  byId("key-input").focus();
}
