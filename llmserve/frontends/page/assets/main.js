// The page put together: the bar, the message box, the keys, and what the server is asked on its own.

import { offerThemes } from "./appearance.js";
import { offerAnswers } from "./ask_dialog.js";
import { Attachments } from "./attachments.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { offerKeys } from "./key_dialog.js";
import { language, setLanguage, text as say, translate, whenTranslated } from "./language.js";
import { Library } from "./library.js";
import { Panels, showShortcuts } from "./panels.js";
import { SystemPrompts } from "./prompts.js";
import { ServerPanel } from "./server_panel.js";
import { Settings } from "./settings.js";
import { hideCard } from "./tokens.js";

translate();
offerThemes();
const settings = new Settings();
new SystemPrompts(settings);
const attachments = new Attachments();
const server = new ServerPanel();
let library = null;
const panels = new Panels((name) => {
  if (name === "server") server.read();
  if (name === "chats") library?.show();
});
const message = byId("message");
let isHeld = false; // a message that was sent too early

const conversation = new Conversation({
  systemPrompt: () => settings.systemPrompt,
  request() {
    if (!connection.model) return null;
    if (settings.check()) return { model: connection.model, stream_options: { include_usage: true }, ...settings.requestFields() };
    panels.open("settings");
    settings.report();
    return null;
  },
  busy(isBusy) {
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
  },
  ended: (answer) => connection.heard(answer),
  kept(isKept) {
    const problem = isKept ? "" : say("notKept");
    byId("unkept").hidden = isKept;
    if (byId("unkept").textContent !== problem) byId("unkept").textContent = problem;
    library?.show();
  },
});

library = new Library(conversation, openConversation);

const connection = new Connection((model) => {
  server.setModel(model);
  if (isHeld) submit();
});

function hold(value) {
  isHeld = value;
  byId("keys-hint").hidden = value;
  byId("held").textContent = value ? say("sentWhenReady") : "";
}

async function submit() {
  const text = message.value.trim();
  if (!(text || attachments.files.length) || conversation.isBusy) return;
  hold(!connection.model);
  if (isHeld) return;
  message.value = "";
  fitMessage();
  const files = attachments.take();
  if (!(await conversation.send(text, files))) {
    message.value = text;
    attachments.set(files);
    fitMessage();
  }
}

/** For browsers that do not size a box by its content. */
function fitMessage() {
  if (CSS.supports("field-sizing", "content")) return;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

/** A new one without any. */
function openConversation(data) {
  conversation.open(data);
  library.show();
  if (panels.current === "chats") panels.close(); // it covers the page
  message.focus();
}

const startOver = () => openConversation();

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
byId("engine-name").addEventListener("click", () => panels.toggle("server"));
message.addEventListener("input", () => {
  hold(false);
  fitMessage();
});
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
  KeyL: () => panels.toggle("chats"),
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

offerAnswers();
offerKeys(() => connection.loadModels());
whenTranslated(() => {
  byId("language").textContent = say("otherLanguage");
  byId("language").lang = language() === "zh" ? "en" : "zh-CN";
});

message.focus();
