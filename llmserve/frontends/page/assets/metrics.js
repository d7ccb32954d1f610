// `GET metrics`, Prometheus' text, and what two readings of it say about the time between them.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** One reading: samples by their name. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\./g, (sign) => ESCAPED[sign] ?? sign);
    }
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return samples;
}

/** Samples of one of `models`, as far as `labels` match. */
export function chosen(samples, name, models, labels = {}) {
  const wanted = Object.entries(labels);
  return (samples.get(name) ?? []).filter(
    (sample) => models.includes(sample.labels.model) && wanted.every(([key, value]) => sample.labels[key] === value),
  );
}

/** Their sum; null when there are none. */
export function total(samples, name, models, labels) {
  const found = chosen(samples, name, models, labels);
  return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/** What has been counted between two readings; null when that is not known. */
export function grown(before, after, name, models, labels) {
  const [first, last] = [total(before, name, models, labels), total(after, name, models, labels)];
  return first === null || last === null || last < first ? null : last - first;
}

/** Of what a histogram has observed between two readings: `mean`, and the `quantile` within its buckets; or null. */
export function observed(before, after, name, models, quantile) {
  const count = grown(before, after, `${name}_count`, models);
  if (!count) return null;
  const bounds = chosen(after, `${name}_bucket`, models).map((sample) => sample.labels.le);
  const buckets = [...new Set(bounds)].map((le) => [
    le === "+Inf" ? Infinity : Number(le), grown(before, after, `${name}_bucket`, models, { le }) ?? 0,
  ]);
  buckets.sort((a, b) => a[0] - b[0]);
  return { mean: grown(before, after, `${name}_sum`, models) / count, quantile: inBuckets(buckets, quantile * count) };
}

/** The value at a rank, as if each bucket's were spread evenly. */
function inBuckets(buckets, rank) {
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank && count > below) {
      return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}
