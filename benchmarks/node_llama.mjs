// Decodes greedily what lines of standard input ask for, [ids, new tokens] each; see llama_engine.py.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";

// Modules are looked for beside this file, and the library is installed in the current folder.
const {getLlama} = await import(createRequire(`${process.cwd()}/`).resolve("node-llama-cpp"));
const [, , modelPath, threads, contextSize] = process.argv;
const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: +contextSize, threads: +threads, batchSize: 512});
const sequence = context.getSequence();
const description = `${llama.llamaCppRelease.release}, ${model.typeDescription}`;
console.log(JSON.stringify({description}));
for await (const line of createInterface({input: process.stdin})) {
  const [prompt, newTokens] = JSON.parse(line), ids = [], began = performance.now();
  let first;
  await sequence.clearHistory();
  for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    first ??= (performance.now() - began) / 1000;
    ids.push(token);
    if (ids.length === newTokens) break;
  }
  console.log(JSON.stringify({ids, first, seconds: (performance.now() - began) / 1000}));
}
process.exit(0);
