// Checks KQL texts with Microsoft's language service. Each text is checked against a schema.
//
// Input (JSON): {SCHEMA: {"tables": {NAME: "(column: type, ...)"}, "functions": {NAME: {"parameters": "(...)", "body":
// "{...}"}}, "texts": {NAME: "KQL"}}}. Output (JSON): {SCHEMA: {NAME: [{"kind": "Query" or "Command", "problems":
// [...], "columns": [[name, type], ...]}]}}, with one entry per query or command. A blank line ends an entry.
"use strict";

const fs = require("node:fs");
require("@kusto/language-service-next/bridge.js");
require("@kusto/language-service-next");

const language = globalThis.Kusto.Language;
const symbols = language.Symbols;

function items(list) {
  return Array.from({ length: list.Count }, (_, index) => list.getItem(index));
}

function globals(schema) {
  const tables = Object.entries(schema.tables).map(([name, columns]) => symbols.TableSymbol.From(columns).WithName(name));
  // This constructor has the parameters name, parameter list, body, and description.
  const functions = Object.entries(schema.functions || {}).map(
    ([name, { parameters, body }]) => new symbols.FunctionSymbol.$ctor16(name, parameters, body, null),
  );
  const database = new symbols.DatabaseSymbol.ctor("database", tables.concat(functions));
  return language.GlobalState.Default.WithDatabase(database);
}

function judged(block, known) {
  const code = language.KustoCode.ParseAndAnalyze(block.Text, known);
  const problems = items(code.GetDiagnostics()).map(
    (each) => `${each.Severity} ${each.Code} at ${each.Start}: ${each.Message}`,
  );
  const result = code.ResultType;
  const columns = result && result.Columns ? items(result.Columns).map((each) => [each.Name, each.Type.Name]) : [];
  return { kind: code.Kind, problems, columns };
}

function answer(question) {
  const known = globals(question);
  const blocks = (text) => items(language.Editor.CodeScript.From$1(text, known).Blocks);
  return Object.fromEntries(
    Object.entries(question.texts).map(([name, text]) => [name, blocks(text).map((block) => judged(block, known))]),
  );
}

const questions = JSON.parse(fs.readFileSync(0, "utf8"));
const answers = Object.entries(questions).map(([name, question]) => [name, answer(question)]);
process.stdout.write(JSON.stringify(Object.fromEntries(answers)));
