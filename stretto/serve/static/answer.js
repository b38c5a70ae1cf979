// An answer's text on the page, as it comes: tokens as coloured spans, code between fences (```) set as code, reasoning
// folded away once the answer itself begins.

const FENCE = /^ {0,3}```/;

function node([text, kind, title]) {
  if (kind === "own" && !title) return document.createTextNode(text);
  const span = document.createElement("span");
  span.className = kind;
  span.title = title;
  span.textContent = text;
  return span;
}

export class AnswerText {
  constructor(root) {
    this.root = root;
    this.thoughts = null; // <details> before the answer
    this.code = null; // <pre> that is open
    this.line = ""; // the last one, as far as it has come
    this.nodes = []; // of that line
  }

  // piece: [text, kind, title]
  think(piece) {
    if (!this.thoughts) {
      this.thoughts = document.createElement("details");
      this.thoughts.className = "thoughts";
      this.thoughts.open = true;
      const title = document.createElement("summary");
      title.textContent = "reasoning";
      this.thoughts.append(title);
      this.root.before(this.thoughts);
    }
    this.thoughts.append(node(piece));
  }

  say([text, kind, title]) {
    if (this.thoughts && !this.root.hasChildNodes()) this.thoughts.open = false;
    for (const part of text.split(/(?<=\n)/)) {
      const one = node([part, kind, title]);
      (this.code || this.root).append(one);
      this.nodes.push(one);
      this.line += part;
      if (part.endsWith("\n")) this.#endLine();
    }
  }

  end() {
    this.#endLine();
  }

  #endLine() {
    const closes = this.code && FENCE.test(this.line) && this.line.trim() === "```";
    if (closes || (!this.code && FENCE.test(this.line))) {
      const fence = document.createElement("span");
      fence.className = "fence";
      fence.append(...this.nodes);
      this.root.append(fence);
      this.code = closes ? null : document.createElement("pre");
      if (this.code) this.root.append(this.code);
    }
    this.line = "";
    this.nodes = [];
  }
}
