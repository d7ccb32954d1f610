// A message as it is shown: its text or its tokens, what was measured, what went wrong, and what can be done with it.

import { tokenCount, tokensPerSecond, UNDER_WAY } from "./answer.js";
import { copyText, element, iconButton } from "./dom.js";
import { number, text as say } from "./language.js";
import { showMarkdown } from "./markdown.js";
import { hideCard, showTokens } from "./tokens.js";

const BUSY = [429, 503];

/** What the server is told of it. */
export function spokenText({ content, files = [] }) {
  const fenced = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `${name}\n${fence}\n${text}\n${fence}`;
  });
  return [...fenced, content].filter(Boolean).join("\n\n");
}

/** `actions` on messages: `again`, `edit` (with a text), `goOn` and `canGoOn`; `versions`, `choose`. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.showsTokens = true; // where it has some
    this.element = element("article", { className: `message ${message.role}` });
    this.update();
  }

  get isUnderWay() {
    return UNDER_WAY.includes(this.message.state);
  }

  update() {
    if (this.message.role === "user") this.showQuestion();
    else this.showAnswer();
  }

  /** All of it again, as when the language has changed. */
  redraw() {
    this.element.replaceChildren();
    this.parts = null;
    this.update();
  }

  showQuestion() {
    const { message } = this;
    this.element.setAttribute("aria-label", say("you"));
    const acts = element("span", { className: "acts" }, this.copyButton(), iconButton("edit", say("edit"), () => this.edit()));
    this.element.replaceChildren(
      ...message.files.map(({ name, text }) => element(
        "details", { className: "file" }, element("summary", {}, name), element("pre", { tabIndex: 0 }, text),
      )),
      element("div", { className: "body", dir: "auto", hidden: !message.content }, message.content),
      element("footer", { className: "meta" }, this.versions(), acts),
    );
  }

  /** Which of several this is, and the way to the others. */
  versions() {
    const all = this.actions.versions(this.message);
    const at = all.indexOf(this.message);
    const shown = element("span", { className: "versions", hidden: all.length < 2 });
    const step = (symbol, name, other) => {
      const button = iconButton(symbol, say(name), () => this.actions.choose(other));
      button.disabled = !other;
      return button;
    };
    if (all.length > 1) shown.append(step("before", "versionBefore", all[at - 1]), `${at + 1}/${all.length}`, step("after", "versionAfter", all[at + 1]));
    return shown;
  }

  /** A box in the message's place. */
  edit() {
    const area = element("textarea", { value: this.message.content, rows: 3 });
    area.setAttribute("aria-label", say("edit"));
    const send = () => area.value.trim() && this.actions.edit(this.message, area.value.trim());
    const leave = () => {
      this.showQuestion();
      this.element.querySelector("[data-act=edit]").focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = element(
      "p", { className: "buttons" },
      element("button", { type: "button", className: "plain", onclick: leave }, say("cancel")),
      element("button", { type: "button", className: "main", onclick: send }, say("saveEdit")),
    );
    this.element.replaceChildren(element("div", { className: "body editing" }, area, buttons));
    area.focus();
  }

  showAnswer() {
    const { message } = this;
    this.parts ??= this.makeParts();
    const { body, thoughts, notice, numbers, acts, goOn } = this.parts;
    thoughts.hidden = !message.thoughts;
    thoughts.lastElementChild.textContent = message.thoughts;
    this.element.classList.toggle("waiting", message.state === "waiting");
    this.element.classList.toggle("writing", message.state === "writing");
    this.element.setAttribute("aria-busy", this.isUnderWay);
    body.classList.toggle("plain", message.isPlain);
    if (message.tokens && this.showsTokens) showTokens(body, message.tokens, message.isPlain && /^\s*[[{]/.test(message.content));
    else if (message.isPlain) body.textContent = message.content;
    else showMarkdown(body, message.content);
    numbers.replaceChildren(...measured(message).map((each) => element("span", {}, each)));
    acts.hidden = this.isUnderWay;
    goOn.hidden = !this.actions.canGoOn(message);
    this.parts.tokens.hidden = message.tokens === null;
    this.showProblem(notice);
  }

  makeParts() {
    this.element.setAttribute("aria-label", say("answer"));
    const tokens = iconButton("tokens", say(this.showsTokens ? "hideTokens" : "showTokens"), () => {
      this.showsTokens = !this.showsTokens;
      hideCard();
      this.redraw();
      this.parts.tokens.focus();
    });
    tokens.setAttribute("aria-pressed", this.showsTokens);
    const parts = {
      tokens,
      body: element("div", { className: "body", dir: "auto" }),
      thoughts: element(
        "details", { className: "thoughts" }, element("summary", {}, say("thoughts")), element("div", { dir: "auto" }),
      ),
      notice: element("div", { className: "notice", hidden: true, attributes: { role: "alert" } }),
      numbers: element("span", { className: "numbers" }),
      goOn: element("button", { type: "button", className: "plain", onclick: () => this.actions.goOn(this.message) }, say("goOn")),
      acts: element(
        "span", { className: "acts" }, this.copyButton(),
        iconButton("again", say("again"), () => this.actions.again(this.message)), tokens,
      ),
    };
    const meta = element("footer", { className: "meta" }, parts.numbers, parts.goOn, this.versions(), parts.acts);
    this.element.replaceChildren(parts.thoughts, parts.body, parts.notice, meta);
    return parts;
  }

  copyButton() {
    return iconButton("copy", say("copy"), async ({ currentTarget }) => {
      await copyText(this.message.content);
      const use = currentTarget.querySelector("use");
      use.setAttribute("href", "#i-done");
      setTimeout(() => use.setAttribute("href", "#i-copy"), 1200);
    });
  }

  showProblem(notice) {
    const problem = problemOf(this.message);
    notice.hidden = !problem;
    notice.classList.toggle("calm", this.message.state === "done");
    if (!problem || notice.dataset.says === problem) return;
    notice.dataset.says = problem;
    notice.replaceChildren(element("span", {}, problem));
    if (this.message.state === "done") return; // a warning
    const again = () => this.actions.again(this.message);
    notice.append(element("button", { type: "button", className: "plain", onclick: again }, say("tryAgain")));
  }
}

function problemOf(message) {
  const { state, problem, retryAfter, status } = message;
  if (state === "lost") return say(message.content || message.tokens ? "lost" : "lostAtOnce");
  if (state !== "refused") return message.warning;
  const told = say(BUSY.includes(status) ? "busy" : "refused", { problem });
  return retryAfter === null ? told : `${told} ${say("tryAfter", { seconds: number(retryAfter) })}`;
}

export function duration(milliseconds) {
  if (milliseconds < 1000) return say("milliseconds", { value: number(milliseconds, milliseconds < 10 ? 1 : 0) });
  return say("seconds", { value: number(milliseconds / 1000, 1) });
}

/** What is worth telling of an answer, in words. */
function measured(message) {
  if (message.firstAfter === null) return [];
  const { count, exact } = tokenCount(message);
  const speed = tokensPerSecond(message);
  const { usage } = message;
  return [
    say(exact ? "tokens" : "tokensAbout", { count: number(count) }),
    speed === null ? "" : say("speed", { speed: number(speed, speed < 100 ? 1 : 0) }),
    say("first", { time: duration(message.firstAfter) }),
    usage ? say("promptTokens", { count: number(usage.prompt_tokens) }) : "",
    usage?.cached_tokens ? say("cachedTokens", { count: number(usage.cached_tokens) }) : "",
    usage?.drafted_tokens
      ? say("draftedTokens", { count: number(usage.accepted_tokens), drafted: number(usage.drafted_tokens) })
      : "",
    ending(message),
  ].filter(Boolean);
}

function ending({ state, finish }) {
  if (state === "stopped") return say("wasStopped");
  if (state !== "done") return "";
  return { stop: say("finishStop"), length: say("finishLength") }[finish] ?? finish;
}
