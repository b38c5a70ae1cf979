// Which parts of a streamed answer were drafts that the model accepted.
//
// A step emits a run of accepted drafts and one token of the model's own, in this order; the latter stands in the place of
// the first rejected draft, where one was rejected. A chunk that covers one step says how many it accepted; one that joins
// several (the reader was slow) cannot say which, and is marked as such.
// The text of a chunk is the server's word: tokens whose text is held back (a stop string may be forming) wait here.

export class TokenPainter {
  constructor() {
    this.last = { steps: 0, drafted: 0, accepted: 0 };
    this.decoder = new TextDecoder();
    this.waiting = []; // [text, kind, title]
  }

  // -> what the chunk adds to the reasoning and to the answer: { thought, said }, each [[text, kind, title], ...]
  paint(chunk) {
    const choice = chunk.choices[0];
    this.#collect(choice?.logprobs?.content || [], chunk.usage?.speculation);
    return { thought: this.#take(choice?.delta?.reasoning_content || ""), said: this.#take(choice?.delta?.content || "") };
  }

  #collect(entries, now) {
    if (!entries.length) return;
    const steps = now ? now.steps - this.last.steps : 1;
    const accepted = now ? now.accepted_tokens - this.last.accepted : 0;
    const rejected = now ? now.drafted_tokens - this.last.drafted - accepted : 0;
    if (now) this.last = { steps: now.steps, drafted: now.drafted_tokens, accepted: now.accepted_tokens };
    entries.forEach((entry, i) => {
      const kind = steps === 1 ? (i < accepted ? "accepted" : rejected > 0 ? "corrected" : "own")
        : !accepted ? "own" : accepted === entries.length ? "accepted" : "joined";
      const text = this.decoder.decode(new Uint8Array(entry.bytes || []), { stream: true });
      const about = kind === "accepted" ? "an accepted draft" : kind === "corrected"
        ? `in the place of a rejected draft (${rejected} rejected)` : kind === "joined" ? "of several steps" : "the model's own";
      this.waiting.push([text, kind, `${JSON.stringify(entry.token)}  ${(100 * Math.exp(entry.logprob)).toFixed(1)} %  ${about}`]);
    });
  }

  #take(text) {
    const out = [];
    let left = text;
    while (left && this.waiting.length) {
      const [piece, kind, title] = this.waiting[0];
      if (left.startsWith(piece)) {
        out.push([piece, kind, title]);
        left = left.slice(piece.length);
        this.waiting.shift();
      } else if (piece.startsWith(left)) { // the rest of the token comes with a later chunk
        out.push([left, kind, title]);
        this.waiting[0] = [piece.slice(left.length), kind, title];
        left = "";
      } else { // a token without text of its own here, such as one that ends the reasoning
        this.waiting.shift();
      }
    }
    if (left) out.push([left, "own", ""]);
    return out.filter(([piece]) => piece);
  }
}
