// /metrics as numbers: the text format of Prometheus, and what two readings say together.

export function parse(text) {
  const found = new Map(); // name -> [{labels, value}]
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const at = line.lastIndexOf(" ");
    const brace = line.indexOf("{");
    const name = brace < 0 ? line.slice(0, at) : line.slice(0, brace);
    const labels = {};
    if (brace >= 0) for (const [, key, value] of line.slice(brace).matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(line.slice(at + 1)) });
  }
  return found;
}

export class Reading {
  constructor(text, time) {
    this.samples = parse(text);
    this.time = time; // seconds
  }

  get(name, label, wanted) {
    const one = (this.samples.get(name) || []).find((sample) => label === undefined || sample.labels[label] === wanted);
    return one ? one.value : 0;
  }

  all(name) {
    return this.samples.get(name) || [];
  }
}

export function delta(now, before, name, label, wanted) {
  return Math.max(0, now.get(name, label, wanted) - before.get(name, label, wanted));
}

export function rate(now, before, name, label, wanted) {
  return delta(now, before, name, label, wanted) / (now.time - before.time);
}

// A quantile of what a histogram observed between two readings; null where it observed nothing.
export function quantile(now, before, name, share) {
  const bounds = now.all(`${name}_bucket`).map((sample) => sample.labels.le);
  const counts = bounds.map((bound) => delta(now, before, `${name}_bucket`, "le", bound));
  const total = counts.at(-1);
  if (!total) return null;
  const at = counts.findIndex((count) => count >= share * total);
  const low = at ? Number(bounds[at - 1]) : 0;
  if (bounds[at] === "+Inf") return low;
  const below = at ? counts[at - 1] : 0;
  return low + (Number(bounds[at]) - low) * (share * total - below) / (counts[at] - below);
}
