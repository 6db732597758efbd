// The parts of the runs, from the page itself or from the live server. A part is cached until its version changes.
"use strict";

async function unzipped(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

let halves = null; // value of each 16-bit float
function halfFloats(bytes) {
  if (!halves) {
    halves = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
      if (exponent === 31) halves[bits] = fraction ? NaN : sign * Infinity;
      else halves[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
    }
  }
  const coded = new Uint16Array(bytes), values = new Float32Array(coded.length);
  for (let index = 0; index < coded.length; index++) values[index] = halves[coded[index]];
  return values;
}

class Run {
  constructor(number, listed) {
    this.number = number;
    this.name = listed.name;
    this.color = runColor(number);
    this.isShown = true;
    this.versions = listed.parts;
    this.known = new Map();
  }

  // Returns whether any part has changed.
  update(listed) {
    const before = this.versions;
    this.versions = listed.parts;
    const names = new Set([...Object.keys(before), ...Object.keys(this.versions)]);
    let isOther = false;
    for (const name of names) {
      if (before[name] === this.versions[name]) continue;
      this.known.delete(name);
      isOther = true;
    }
    return isOther;
  }

  has(name) {
    return name in this.versions;
  }

  get sampleSteps() {
    return Object.keys(this.versions).filter((name) => name.startsWith("samples/")).map((name) => Number(name.slice(8))).sort((a, b) => a - b);
  }

  part(name) {
    if (!this.known.has(name)) this.known.set(name, this.read(name));
    return this.known.get(name);
  }

  async read(name) {
    if (!this.has(name)) return null;
    let bytes;
    if (report.isLive) {
      const answer = await fetch(`part/${this.number}/${name}`);
      if (!answer.ok) return null; // it was deleted after it was listed
      bytes = new Uint8Array(await answer.arrayBuffer());
    } else bytes = fromBase64(document.getElementById(`part/${this.number}/${name}`).textContent);
    bytes = await unzipped(bytes);
    return name.startsWith("samples/") ? readSamples(bytes) : JSON.parse(new TextDecoder().decode(bytes));
  }
}

// Decodes the format of sample_part.py.
function readSamples(bytes) {
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  if (header.problem) return { ...header, rows: [] };
  const ends = [0];
  for (const length of header.response_length) ends.push(ends[ends.length - 1] + length);
  const total = ends[ends.length - 1];
  let start = 4 + size;
  const take = (width) => bytes.slice(start, (start += total * width)).buffer;
  const places = header.wide ? new Uint32Array(take(4)) : new Uint16Array(take(2));
  const [logProbs, gaps, advantages, weights, shares] = [0, 1, 2, 3, 4].map(() => halfFloats(take(2)));
  const excluded = new Uint8Array(take(1));
  const rows = header.uid.map((uid, row) => {
    const of = (values) => values.subarray(ends[row], ends[row + 1]);
    const scalars = ["response", "ground_truth", "score", "score_parts", "advantage", "weight_version", "prompt_length", "response_length"];
    const sample = { step: header.step, uid, prompt: header.prompts[header.prompt[row]], finish: header.finish_reason[row] };
    for (const name of scalars) sample[name] = header[name][row];
    sample.source = header.data_source[row];
    sample.maxGap = header.max_gap[row];
    sample.share = header.share[row];
    sample.episode = header.episode[row];
    sample.numbers = header.numbers[row];
    sample.tokens = { header, places: of(places), logProbs: of(logProbs), gaps: of(gaps), advantages: of(advantages), weights: of(weights), shares: of(shares), excluded: of(excluded) };
    return sample;
  });
  return { step: header.step, of: header.of, rows };
}

const report = {
  isLive: false,
  version: "",
  runs: [],
  get shown() {
    return this.runs.filter((run) => run.isShown);
  },
  start() {
    const manifest = JSON.parse(document.getElementById("manifest").textContent);
    this.isLive = manifest.live;
    this.version = manifest.version;
    this.runs = manifest.runs.map((listed, number) => new Run(number, listed));
  },
  async ask() {
    const answer = await fetch("manifest");
    const manifest = await answer.json();
    return manifest.runs.map((listed, number) => this.runs[number].update(listed)).some((isOther) => isOther);
  },
};
