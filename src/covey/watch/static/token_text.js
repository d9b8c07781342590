// A completion as its tokens, tinted by a number; the numbers of a token show on hover and with the arrow keys.

import { h, put } from "./dom.js";
import { nodes } from "./plain_text.js";
import { numbersOf, tint, TINTS } from "./tints.js";

const SHOWN_AT_FIRST = 1500; // tokens

// One box for all tokens of the page, as only one token is current.
const numbers = h("div", { class: "token-numbers", role: "status", hidden: true });
document.body.append(numbers);
addEventListener("scroll", () => (numbers.hidden = true), { passive: true });

export class TokenText {
  // `first`: the place of the first token in the completion.
  constructor(tokens, name, first = 0) {
    Object.assign(this, { tokens, first });
    this.at = null;
    this.el = h("div", { class: "output tokens", role: "group", tabIndex: 0, "aria-label": `Tokens of ${name}. The arrow keys move from token to token.` });
    this.show(SHOWN_AT_FIRST);
    const pointed = (event) => this.read(this.spans.indexOf(event.target.closest(".token")));
    this.el.addEventListener("pointerover", pointed);
    this.el.addEventListener("click", pointed);
    this.el.addEventListener("pointerleave", () => this.read(-1));
    this.el.addEventListener("blur", () => this.read(-1));
    this.el.addEventListener("keydown", (event) => this.onKey(event));
  }

  show(length) {
    const { texts, logprobs } = this.tokens;
    this.spans = texts.slice(0, length).map((text, i) => h("span", { class: logprobs?.[i] === null ? "token given" : "token" }, nodes(text)));
    this.el.replaceChildren(...this.spans);
    if (texts.length <= length) return;
    const more = h("button", { type: "button", class: "more" }, `Show all ${texts.length} tokens`);
    more.addEventListener("click", () => {
      this.show(Infinity);
      this.tint(this.key, this.most);
    });
    this.el.append(more);
  }

  tint(key, most) {
    Object.assign(this, { key, most });
    this.spans.forEach((span, i) => tint(span, TINTS[key].value(this.tokens, i), most));
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -1e9, End: 1e9 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    this.read(this.at === null ? 0 : Math.max(0, Math.min(this.spans.length - 1, this.at + step)));
  }

  read(index) {
    if (this.at !== null) this.spans[this.at]?.classList.remove("current");
    this.at = index >= 0 ? index : null;
    numbers.hidden = this.at === null;
    if (this.at === null) return;
    const span = this.spans[index];
    const { ids, texts, logprobs } = this.tokens;
    span.classList.add("current");
    put(numbers, h("p", {}, `token ${this.first + index + 1}: `, h("code", {}, nodes(JSON.stringify(texts[index]))), ` id ${ids[index] ?? "?"}`),
      logprobs?.[index] === null ? h("p", {}, "not decided by the policy") : h("dl", {}, numbersOf(this.tokens, index).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
    this.place(span);
  }

  place(span) {
    const { left, bottom, top } = span.getBoundingClientRect();
    const { width, height } = numbers.getBoundingClientRect();
    const y = bottom + 6 + height < innerHeight ? bottom + 6 : Math.max(4, top - 6 - height);
    numbers.style.setProperty("--x", `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`);
    numbers.style.setProperty("--y", `${y}px`);
  }
}
