// A completion as its tokens, tinted by a number; the numbers of a token show on hover and with the arrow keys.

import { h, say } from "./dom.js";
import { nodes } from "./plain_text.js";
import { numbersOf, tint, TINTS } from "./tints.js";

const SHOWN_AT_FIRST = 1500; // tokens

export class TokenText {
  constructor(tokens, name) {
    this.tokens = tokens;
    this.at = null;
    this.box = h("div", { class: "output tokens", role: "group", tabIndex: 0, "aria-label": `Tokens of ${name}. The arrow keys move from token to token.` });
    this.line = h("p", { class: "token-numbers", "aria-live": "polite" });
    this.el = h("div", {}, this.box, this.line);
    this.show(SHOWN_AT_FIRST);
    this.box.addEventListener("pointerover", (event) => this.read(this.spans.indexOf(event.target.closest(".token"))));
    this.box.addEventListener("click", (event) => this.read(this.spans.indexOf(event.target.closest(".token"))));
    this.box.addEventListener("pointerleave", () => document.activeElement !== this.box && this.read(-1));
    this.box.addEventListener("blur", () => this.read(-1));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
  }

  show(length) {
    const { texts, logprobs } = this.tokens;
    this.spans = texts.slice(0, length).map((text, i) => h("span", { class: logprobs?.[i] === null ? "token given" : "token" }, nodes(text)));
    this.box.replaceChildren(...this.spans);
    if (texts.length <= length) return;
    const more = h("button", { type: "button", class: "more" }, `Show all ${texts.length} tokens`);
    more.addEventListener("click", () => {
      this.show(Infinity);
      this.tint(this.key, this.most);
    });
    this.box.append(more);
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
    if (this.at === null) {
      say(this.line, "");
      return;
    }
    this.spans[index].classList.add("current");
    const { ids, texts } = this.tokens;
    this.line.replaceChildren(h("b", {}, `token ${index + 1}`), " ", h("code", {}, nodes(JSON.stringify(texts[index]))), ` id ${ids[index]}`,
      this.tokens.logprobs?.[index] === null ? " \u00b7 not decided by the policy" : numbersOf(this.tokens, index).map(([name, text]) => ` \u00b7 ${name} ${text}`));
  }
}
