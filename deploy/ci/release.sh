#!/usr/bin/env bash
# Build, gate, publish, roll out: an engine reaches traffic only with its own proof. docs/releasing.md says how.
#
#   CHECKPOINT     folder, or FILE.gguf
#   ENGINES        folder of released engines, as the server sees it
#   SERVER         HTTP port of the running server, http://HOST:PORT; without it nothing is rolled out
#   SUITES         suite files, separated by spaces
#   BUILD_FLAGS    of llmserve build, such as "--quantization int8"
#   ROLLOUT_FLAGS  of llmserve rollout start, such as "--shadow 10% --canary 5%,25%"
#   SIGN_KEY       private key (PEM, Ed25519) for the records; optional
#   API_KEY        with admin rights in the server; optional
#   REPORTS        folder for reports; default: reports
set -euo pipefail
: "${CHECKPOINT:?}" "${ENGINES:?}" "${SUITES:?}"
REPORTS=${REPORTS:-reports}

mkdir -p "$ENGINES" "$REPORTS"
built=$(mktemp -d "$ENGINES/.release-XXXXXX")  # on the disk of ENGINES, so that publishing is a rename
trap 'rm -rf "$built"' EXIT

# shellcheck disable=SC2086 -- flags and suites are lists
llmserve build "$CHECKPOINT" ${BUILD_FLAGS:-} --output-dir "$built/engine"

digest=$(llmserve inspect "$built/engine" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["manifest"]["engine_digest"][:12])')
name=$(basename "$CHECKPOINT")-$digest
mv "$built/engine" "$built/$name"

for suite in $SUITES; do  # the first that does not pass ends the release
  llmserve eval "$built/$name" --hf-model-dir "$CHECKPOINT" --suite "$suite" \
    --output "$REPORTS/$(basename "$suite" .yaml).json" ${SIGN_KEY:+--sign-key "$SIGN_KEY"}
done

engine=$ENGINES/$name
if [ -d "$engine" ]; then  # released before, and perhaps served: the same engine, of which there is now another proof
  mv "$built/$name/gate.jsonl" "$engine/gate.jsonl"
else
  mv "$built/$name" "$engine"
fi
echo "published: $engine"

if [ -n "${SERVER:-}" ]; then
  # shellcheck disable=SC2086
  llmserve rollout start tensorrt_llm --engine "$engine" --url "$SERVER" ${API_KEY:+--api-key "$API_KEY"} --wait ${ROLLOUT_FLAGS:-}
fi
