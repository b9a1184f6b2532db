"use strict";
// Unpacks the browser of @sparticuz/chromium: node unpack.js DIRECTORY, which has its `node_modules`.
const { execFileSync } = require("node:child_process");
const { chmodSync, mkdirSync, readFileSync, writeFileSync } = require("node:fs");
const { brotliDecompressSync } = require("node:zlib");

const home = process.argv[2];
const unpacked = (name) => brotliDecompressSync(readFileSync(`${home}/node_modules/@sparticuz/chromium/bin/${name}.br`));

for (const name of ["al2023", "fonts"]) {
  mkdirSync(`${home}/${name}`);
  execFileSync("tar", ["-x", "-C", `${home}/${name}`], { input: unpacked(`${name}.tar`) });
}
writeFileSync(`${home}/chromium`, unpacked("chromium"));
chmodSync(`${home}/chromium`, 0o755);
