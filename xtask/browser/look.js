"use strict";
// Looks at each view of a dashboard as a reader would, and takes its picture: node look.js HOME URL PICTURES [docs].
// HOME is where `unpack.js` has put a browser. It fails where a view is empty, or where the browser has something to complain of.
// With `docs` the pictures are those of the documentation: wide, light and small.
const { withPage, until, run } = require("./browser.js");
const [home, url, pictures, use] = process.argv.slice(2);

// Of each view, what is there once it is drawn, keys that are pressed then, and what says something else behind them.
const VIEWS = {
  run: { drawn: "#main canvas", says: "reward" },
  goodput: { drawn: "#main table", says: "trained" },
  samples: { drawn: "#main tr[data-position]", says: "reward", keys: ["j"], told: "aside" },
  "all answers": { hash: "samples?kind=all&order=best", drawn: "#main tr[data-position]", says: "looked at" },
  fleet: { drawn: "#main .hosts table", says: "serving" },
  time: { drawn: "#main canvas.timeline", says: "steps", keys: ["j", "j", "+", "ArrowRight", "k", "0"], told: ".told" },
  store: { drawn: "#main table", says: "Versions" },
};
const SIZES = { wide: { width: 1200, height: 800 }, phone: { width: 390, height: 800, isMobile: true, hasTouch: true } };
const SHAPES = use === "docs" ? [["wide", "light"]] : Object.keys(SIZES).flatMap((size) => [[size, "light"], [size, "dark"]]);

async function look(page, name, { hash = name, drawn, says, keys, told }, size) {
  await page.goto(`${url}/#${hash}`);
  await page.waitForSelector(drawn);
  await until(page, `${name} with \`${says}\``, (words) => document.getElementById("main").innerText.includes(words), says);
  if (keys) {
    const before = await page.$eval(told, (element) => element.innerText);
    for (const key of keys) await page.keyboard.press(key);
    await until(page, `other words in ${told} behind the keys ${keys}`, (place, words) => document.querySelector(place).innerText !== words, told, before);
  }
  const nothing = await page.$eval("#main", (main) => main.innerText.split("\n").find((line) => ["null", "undefined", "NaN"].includes(line)));
  if (nothing) throw new Error(`${name}: expected words, found \`${nothing}\``);
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wider > 0) throw new Error(`${name}, ${size}: expected a page as wide as its window, found ${wider} pixels more`);
}

run(async () => {
  await withPage(home, pictures, async (page) => {
    for (const [size, scheme] of SHAPES) {
      await page.setViewport(SIZES[size]);
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      for (const [name, view] of Object.entries(VIEWS).filter(([, { hash }]) => use !== "docs" || !hash)) {
        await look(page, name, view, size);
        const path = use === "docs" ? `${pictures}/${name}.webp` : `${pictures}/${name}-${size}-${scheme}.webp`;
        await page.screenshot({ path, type: "webp", quality: 80 });
      }
    }
  });
  console.log(`${Object.keys(VIEWS).length} views in ${SHAPES.length} shapes, as ${pictures}/*.webp`);
});
