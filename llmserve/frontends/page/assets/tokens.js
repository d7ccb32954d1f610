// An answer's tokens, each with its probability: the less likely, the darker. A card tells what else could have come.

import { byId, element } from "./dom.js";
import { number, text as say } from "./language.js";

const DOUBTFUL_LOG_PROB = 4; // in nats: as dark as it gets
const VISIBLE = { "\n": "⏎", "\t": "⇥", " ": "␣" };

const percent = (logprob) => `${number(Math.exp(logprob) * 100, Math.exp(logprob) < 0.1 ? 2 : 1)} %`;
const visible = (text) => (text.trim() ? text : text.replace(/[\n\t ]/g, (sign) => VISIBLE[sign]) || "∅");

/** Appends what has come since the last call to `container`. `isJson`: white space between its tokens means nothing. */
export function showTokens(container, tokens, isJson) {
  if (!container.classList.contains("tokens")) {
    container.replaceChildren();
    container.classList.add("tokens");
    container.setAttribute("role", "list");
    container.setAttribute("aria-label", say("tokensLabel"));
    container.decoder = new TextDecoder(); // a character may be of several tokens
    container.addEventListener("keydown", moveFocus);
  }
  for (const token of tokens.slice(container.children.length)) container.append(tokenElement(container, token, isJson));
}

/** A sign for each line break, and a new line: in JSON only where an object, a list or its next member begins. */
function lines(container, text, isJson) {
  return text.split(/(\n)/).filter(Boolean).flatMap((part) => {
    if (part !== "\n") {
      if (part.trim()) container.lastSign = part.trimEnd().at(-1);
      return [part];
    }
    const breaks = !isJson || "{[,".includes(container.lastSign);
    if (isJson) container.lastSign = "\n";
    return [element("i", { className: "line" }), breaks ? part : ""];
  });
}

function tokenElement(container, token, isJson) {
  const text = container.decoder.decode(Uint8Array.from(token.bytes), { stream: true });
  const span = element("span", { className: "token", tabIndex: container.children.length ? -1 : 0 }, ...lines(container, text, isJson));
  span.setAttribute("role", "listitem");
  span.style.setProperty("--unlikely", Math.min(-token.logprob / DOUBTFUL_LOG_PROB, 1).toFixed(3));
  span.setAttribute("aria-label", say("tokenLabel", { token: visible(token.token), value: percent(token.logprob) }));
  const show = () => showCard(span, token);
  span.addEventListener("pointerenter", show);
  span.addEventListener("focus", show);
  span.addEventListener("pointerleave", hideCard);
  span.addEventListener("blur", hideCard);
  return span;
}

function moveFocus(event) {
  const spans = [...event.currentTarget.children];
  const at = spans.indexOf(document.activeElement);
  const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 };
  const next = spans[steps[event.key]];
  if (at < 0 || !next) return;
  event.preventDefault();
  spans[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function showCard(span, token) {
  const card = byId("token-card");
  const others = token.top.filter(([text]) => text !== token.token);
  const rows = [[token.token, token.logprob], ...others].sort((a, b) => b[1] - a[1]);
  card.replaceChildren(...rows.map(([text, logprob]) => row(text, logprob, text === token.token)));
  card.hidden = false;
  span.setAttribute("aria-describedby", card.id);
  place(card, span.getClientRects()[0] ?? span.getBoundingClientRect());
}

function row(text, logprob, isChosen) {
  const share = element("i");
  share.style.setProperty("--share", Math.exp(logprob));
  const bar = element("span", { className: "bar" }, share);
  const name = element("code", {}, visible(text));
  return element("div", { className: isChosen ? "row chosen" : "row" }, name, element("span", {}, percent(logprob)), bar);
}

/** Below the token if there is room, else above it. */
function place(card, around) {
  const gap = 8;
  const { width, height } = card.getBoundingClientRect();
  const left = Math.max(gap, Math.min(around.left, innerWidth - width - gap));
  const below = around.bottom + gap;
  const top = below + height < innerHeight ? below : Math.max(gap, around.top - height - gap);
  card.style.left = `${left}px`;
  card.style.top = `${top}px`;
}

export function hideCard() {
  byId("token-card").hidden = true;
}
