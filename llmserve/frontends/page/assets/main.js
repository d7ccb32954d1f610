// The page put together: the bar, the message box, the keys, and what the server is asked on its own.

import { offerThemes } from "./appearance.js";
import { health, modelNames, Refused } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { askForKey, offerKeys } from "./key_dialog.js";
import { language, setLanguage, text as say, translate, whenTranslated } from "./language.js";
import { Panels, showShortcuts } from "./panels.js";
import { ServerPanel } from "./server_panel.js";
import { Settings } from "./settings.js";
import { forThisTab } from "./store.js";
import { hideCard } from "./tokens.js";

const HEALTH_INTERVAL_MS = { ready: 5000, loading: 1000, gone: 1000 };
const UNAUTHORIZED = 401;
const HEALTH_TEXTS = { ready: "healthReady", loading: "healthLoading", gone: "healthGone" };

translate();
offerThemes();
const settings = new Settings();
const server = new ServerPanel();
const panels = new Panels((name) => name === "server" && server.read());
const message = byId("message");
const models = byId("model");
let healthState = "loading";

const conversation = new Conversation({
  systemPrompt: () => settings.systemPrompt,
  request() {
    if (!models.value) return null;
    if (settings.check()) return { model: models.value, stream_options: { include_usage: true }, ...settings.requestFields() };
    panels.open("settings");
    settings.report();
    return null;
  },
  busy(isBusy) {
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
  },
  ended(answer) {
    if (answer.status === UNAUTHORIZED) askForKey(answer.problem);
    if (answer.state === "lost") checkHealth();
  },
});

async function loadModels() {
  try {
    showModels(await modelNames());
  } catch (error) {
    if (!(error instanceof Refused)) {
      healthState = "gone"; // asked again when it is back
      showHealth();
      return;
    }
    showModels([]);
    if (error.status === UNAUTHORIZED) askForKey(error.message);
  }
}

function showModels(names) {
  const wanted = models.value || forThisTab.get("model");
  const chosen = names.includes(wanted) ? wanted : (names[0] ?? "");
  const options = names.map((name) => element("option", { value: name }, name));
  models.replaceChildren(...(options.length ? options : [element("option", { value: "" }, say("noModel"))]));
  models.value = chosen;
  models.disabled = !names.length;
  byId("send").disabled = !names.length;
  if (chosen) server.setModel(chosen);
}

async function checkHealth() {
  const state = await health();
  const isBack = state === "ready" && healthState !== "ready";
  healthState = state;
  showHealth();
  if (isBack) await loadModels();
}

function showHealth() {
  byId("health").dataset.state = healthState;
  const says = say(HEALTH_TEXTS[healthState]);
  const node = byId("health-text");
  if (node.textContent !== says) node.textContent = says;
  node.toggleAttribute("data-says", healthState !== "ready");
}

async function submit() {
  const text = message.value.trim();
  if (!text || conversation.isBusy) return;
  message.value = "";
  fitMessage();
  if (!(await conversation.send(text))) {
    message.value = text;
    fitMessage();
  }
}

/** For browsers that do not size a box by its content. */
function fitMessage() {
  if (CSS.supports("field-sizing", "content")) return;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

function startOver() {
  conversation.clear();
  message.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => {
  conversation.stop();
  message.focus();
});
byId("new-chat").addEventListener("click", startOver);
byId("language").addEventListener("click", () => setLanguage(language() === "zh" ? "en" : "zh"));
models.addEventListener("change", () => {
  forThisTab.set("model", models.value);
  server.setModel(models.value);
});
message.addEventListener("input", fitMessage);
message.addEventListener("keydown", (event) => {
  if (event.isComposing) return; // an input method's own Enter
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !message.value) {
    event.preventDefault();
    conversation.editLast();
  }
});

const WITH_ALT = {
  KeyN: startOver,
  KeyR: () => conversation.again(),
  KeyS: () => panels.toggle("settings"),
  KeyM: () => panels.toggle("server"),
  KeyK: showShortcuts,
};
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const isTyping = event.target.closest("input, textarea, select") !== null;
  if (event.altKey && !event.ctrlKey && !event.metaKey && WITH_ALT[event.code]) WITH_ALT[event.code]();
  else if (event.key === "Escape") escape();
  else if (event.key === "/" && !isTyping) message.focus();
  else return;
  event.preventDefault();
});

function escape() {
  hideCard();
  if (conversation.isBusy) conversation.stop();
  else if (panels.current) panels.close();
}

offerKeys(() => loadModels());
whenTranslated(() => {
  byId("language").textContent = say("otherLanguage");
  byId("language").lang = language() === "zh" ? "en" : "zh-CN";
  showHealth();
});

async function watchHealth() {
  if (document.visibilityState === "visible") await checkHealth();
  setTimeout(watchHealth, HEALTH_INTERVAL_MS[healthState]);
}
watchHealth();
message.focus();
