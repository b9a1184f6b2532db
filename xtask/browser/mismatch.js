"use strict";
// Plants a mismatch in what a run's learner computed, and finds it by the page as a stranger would: node mismatch.js HOME URL FILES LEARNED.
// LEARNED is the directory `learned` of the run's log, whose bytes docs/format/log.md describes.
const fs = require("fs");
const { withPage, until, run } = require("./browser.js");
const [home, url, files, learned] = process.argv.slice(2);

// So far is the planted token from the engine's log-prob, in nats.
const PLANTED = 2;

function crc32c(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return (crc ^ 0xffffffff) >>> 0;
}

// Has the learner think less of one token of a step in the middle, and returns where that is.
function plant() {
  const names = fs.readdirSync(learned).filter((name) => name.endsWith(".columns")).sort();
  const path = `${learned}/${names[names.length >> 1]}`;
  const bytes = fs.readFileSync(path);
  const end = 64 + 32 * Number(bytes.readBigUInt64LE(24));
  let row = 64;
  while (row + 32 < end && Number.isNaN(bytes.readFloatLE(row + 20))) row += 32;
  const from = Number(bytes.readBigUInt64LE(row + 8));
  let token = bytes.readUInt32LE(row + 16) - 1;
  while (token > 0 && Number.isNaN(bytes.readFloatLE(from + 4 * token))) token--;
  bytes.writeFloatLE(bytes.readFloatLE(from + 4 * token) - PLANTED, from + 4 * token);
  bytes.writeFloatLE(PLANTED, row + 20);
  bytes.writeUInt32LE(crc32c(bytes.subarray(from, from + 4 * bytes.readUInt32LE(row + 16))), row + 24);
  bytes.writeUInt32LE(crc32c(bytes.subarray(64, end)), 40);
  bytes.writeUInt32LE(crc32c(bytes.subarray(0, 60)), 60);
  fs.writeFileSync(`${path}.new`, bytes);
  fs.renameSync(`${path}.new`, path);
  return { step: String(bytes.readBigUInt64LE(16)), position: String(bytes.readBigUInt64LE(row)), token: String(token) };
}

// What pointing at each token says, of the one that is furthest from 0.
const furthest = () => {
  const told = (token) => {
    token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
    const said = document.querySelector("aside .hint").textContent.match(/mismatch (-?[\d.]+)/);
    const isSeen = Boolean(token.style.backgroundColor) && token.getBoundingClientRect().width > 0;
    return [Math.abs(Number(said?.[1] ?? 0)), token.dataset.token, isSeen];
  };
  return [...document.querySelectorAll("aside [data-token]")].map(told).sort(([one], [other]) => other - one)[0];
};

run(async () => {
  const planted = plant();
  await withPage(home, files, async (page) => {
    await page.setViewport({ width: 1200, height: 800 });
    await page.goto(`${url}/#samples`);
    await page.waitForSelector("#main tr[data-position]");
    await page.select('[aria-label="which answers"]', "mismatched");
    await until(page, "answers of all steps", () => document.querySelector("#main .note")?.innerText.includes("all steps"));
    await page.click("#main tr[data-position]");
    await page.waitForSelector("aside [aria-label=colours]");
    await page.select("aside [aria-label=colours]", "mismatch");
    const position = await page.$eval("#main tr.chosen", (row) => row.dataset.position);
    const step = await page.$eval("aside dl", (facts) => facts.innerText.match(/nats, in step (\d+)/)?.[1]);
    const [nats, token, isSeen] = await page.evaluate(furthest);
    const found = { step, position, token };
    if (JSON.stringify(found) !== JSON.stringify(planted) || Math.abs(nats - PLANTED) > 0.5 || !isSeen) {
      throw new Error(`expected ${PLANTED} nats at ${JSON.stringify(planted)}, in a colour that is seen, found ${nats} at ${JSON.stringify(found)}`);
    }
    await page.screenshot({ path: `${files}/mismatch.webp`, type: "webp", quality: 80 });
  });
  console.log(`the largest mismatch of the run: token ${planted.token} of the answer at position ${planted.position}, in step ${planted.step}`);
});
