// The form of settings, and the fields of a request that they become. What is left empty is left to the server.

import { byId } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { forThisTab } from "./store.js";

const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
  "repetition_penalty",
];
const NUM_ALTERNATIVES = 5;
export const DEFAULT_LIMIT = 2048; // tokens of an answer; a model that does not end would go on for minutes

export class Settings {
  constructor() {
    this.form = byId("settings-form");
    this.fields = this.form.elements;
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset-settings").addEventListener("click", () => {
      const key = byId("api-key").value;
      this.form.reset();
      byId("api-key").value = key;
      this.changed();
    });
    whenTranslated(() => this.showFormat());
  }

  changed() {
    const named = [...this.fields].filter((field) => field.name);
    const values = named.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    forThisTab.set("settings", Object.fromEntries(values));
    this.check();
    this.showFormat();
  }

  restore() {
    for (const [name, value] of Object.entries(forThisTab.get("settings", {}))) {
      const field = this.fields[name];
      if (field?.type === "checkbox") field.checked = value;
      else if (field) field.value = value;
    }
  }

  /** Also beside the message box: an answer's form is soon forgotten. */
  showFormat() {
    const format = this.fields.format.value;
    byId("schema-field").hidden = format !== "json_schema";
    byId("regex-field").hidden = format !== "regex";
    const badge = byId("format-badge");
    badge.hidden = format === "text";
    badge.textContent = this.fields.format.selectedOptions[0].textContent;
  }

  /** Whether everything can be sent; what cannot says so itself. */
  check() {
    const { format, schema, regex } = this.fields;
    schema.setCustomValidity(format.value === "json_schema" ? problemOfSchema(schema.value) : "");
    regex.setCustomValidity(format.value === "regex" && !regex.value ? say("emptyField") : "");
    return this.form.checkValidity();
  }

  /** Leads to what is wrong; the form must be shown. */
  report() {
    this.form.reportValidity();
  }

  get systemPrompt() {
    return this.fields.system.value.trim();
  }

  /** Of a chat completion. */
  requestFields() {
    const filled = NUMBERS.filter((name) => this.fields[name].value !== "");
    const numbers = filled.map((name) => [name, this.fields[name].valueAsNumber]);
    const request = { max_tokens: DEFAULT_LIMIT, ...Object.fromEntries(numbers) };
    const stop = this.fields.stop.value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
    if (stop.length) request.stop = stop;
    if (this.fields.logprobs.checked) Object.assign(request, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
    return { ...request, ...this.formatFields() };
  }

  formatFields() {
    const { format, schema, regex } = this.fields;
    switch (format.value) {
      case "json_object":
        return { response_format: { type: "json_object" } };
      case "json_schema":
        return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema.value) } } };
      case "regex":
        return { structured_outputs: { regex: regex.value } };
      default:
        return {};
    }
  }
}

function problemOfSchema(text) {
  try {
    const schema = JSON.parse(text);
    if (schema !== null && typeof schema === "object" && !Array.isArray(schema)) return "";
    return say("badSchema", { problem: "{ }" });
  } catch (error) {
    return say("badSchema", { problem: error.message });
  }
}
