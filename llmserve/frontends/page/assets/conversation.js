// The messages, the answer that is under way, and how they are shown. One answer at a time.

import { newAnswer, receive, UNDER_WAY } from "./answer.js";
import { byId, frameScheduler } from "./dom.js";
import { text as say, whenTranslated } from "./language.js";
import { MessageView } from "./message_view.js";
import { forThisTab } from "./store.js";

const NEAR_PX = 80; // the end of the conversation is followed from here
const SAID = { done: "saidDone", stopped: "saidStopped" };

/** A message of before the page was loaded: whatever was under way is not any more. */
const leftOver = (message) => (UNDER_WAY.includes(message.state) ? { ...message, state: "stopped" } : message);

export class Conversation {
  /** `request()` is what is asked, but for the messages; null when it cannot be. `ended(answer)`. */
  constructor({ request, systemPrompt, ended, busy }) {
    this.request = request;
    this.systemPrompt = systemPrompt;
    this.ended = ended;
    this.busy = busy;
    this.views = [];
    this.abort = null; // of the answer that is under way
    this.inFrame = frameScheduler();
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.actions = { again: (message) => this.again(message), edit: (message, text) => this.edit(message, text) };
    for (const message of forThisTab.get("conversation", [])) this.append(leftOver(message));
    addEventListener("pagehide", () => this.keep());
    whenTranslated(() => this.views.forEach((view) => view.redraw()));
    this.showWelcome();
    this.toEnd();
  }

  get messages() {
    return this.views.map((view) => view.message);
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Whether it was sent. */
  async send(text) {
    const request = this.isBusy ? null : this.request();
    if (!request) return false;
    this.append({ role: "user", content: text });
    await this.answer(request);
    return true;
  }

  /** Another answer in the place of `message`, or of the last one. */
  async again(message = this.messages.at(-1)) {
    const request = message && !this.isBusy ? this.request() : null;
    if (!request) return;
    this.cut(message.role === "user" ? this.messages.indexOf(message) + 1 : this.messages.indexOf(message));
    await this.answer(request);
  }

  /** A question in other words; what followed it is gone. */
  async edit(message, text) {
    const request = this.isBusy ? null : this.request();
    if (!request) return;
    this.cut(this.messages.indexOf(message));
    this.append({ role: "user", content: text });
    await this.answer(request);
  }

  editLast() {
    if (!this.isBusy) this.views.findLast((view) => view.message.role === "user")?.edit();
  }

  /** The server frees what it has for the answer. */
  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.cut(0);
    this.keep();
  }

  async answer(request) {
    const messages = this.spoken();
    const answer = newAnswer(request);
    const view = this.append(answer);
    this.abort = new AbortController();
    this.keep();
    this.busy(true);
    this.toEnd();
    const { signal } = this.abort;
    const show = () => this.followed(() => view.update());
    await receive(answer, { ...request, messages }, { signal, changed: () => this.inFrame(show) });
    this.abort = null;
    this.busy(false);
    this.keep();
    byId("announcer").textContent = say(SAID[answer.state] ?? "saidFailed");
    this.ended(answer);
  }

  /** As the server takes them. Answers without a word are left out. */
  spoken() {
    const system = this.systemPrompt();
    const said = this.messages.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  append(message) {
    const view = new MessageView(message, this.actions);
    this.views.push(view);
    this.log.append(view.element);
    this.showWelcome();
    return view;
  }

  cut(length) {
    for (const view of this.views.splice(length)) view.element.remove();
    this.showWelcome();
  }

  keep() {
    forThisTab.set("conversation", this.messages);
  }

  showWelcome() {
    byId("welcome").hidden = this.views.length > 0;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** What is below the end stays in sight, unless somebody has scrolled up to read. */
  followed(change) {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    change();
    if (isNear) this.toEnd();
  }
}
