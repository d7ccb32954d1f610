// Chromium, its libraries and its software renderer, out of the package's compressed files into browser/ beside this one.

import { execFileSync } from "node:child_process";
import { createReadStream, createWriteStream } from "node:fs";
import { chmod, mkdir, readdir, rm } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { pipeline } from "node:stream/promises";
import { fileURLToPath } from "node:url";
import { createBrotliDecompress } from "node:zlib";

const here = dirname(fileURLToPath(import.meta.url));
const source = join(here, "node_modules/@sparticuz/chromium/bin");
const target = join(here, "browser");
const otherMachines = process.arch === "x64" ? "arm64" : "x64";

await rm(target, { recursive: true, force: true });
await mkdir(target, { recursive: true });
for (const name of await readdir(source, { recursive: true })) {
  if (!name.endsWith(".br") || name.startsWith(otherMachines)) continue;
  const unpacked = join(target, basename(name, ".br"));
  await pipeline(createReadStream(join(source, name)), createBrotliDecompress(), createWriteStream(unpacked));
  if (unpacked.endsWith(".tar")) {
    execFileSync("tar", ["-xf", unpacked, "-C", target]);
    await rm(unpacked);
  } else {
    await chmod(unpacked, 0o755);
  }
}
