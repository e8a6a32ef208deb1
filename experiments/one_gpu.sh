#!/bin/sh
# What docs/accuracy.md and docs/tasks.md still lack, on one GPU, in one command (its limits add up to 17 minutes; not yet run as a whole):
#
#     ECHOREDUCE_DATA=DATA sh experiments/one_gpu.sh SMOLLM2_FOLDER GEMMA_FOLDER results_h200
#
# Gemma 3 270M at P = 2, 4 and 8: Table 4 on all texts, Table 8 on WikiText-2, GSM8K solutions, and at P = 4 some tasks; SmolLM2: GSM8K solutions
# and the claims of Table 8 window by window at P = 2, 4 and 8, the other presets on the same tasks. Each step continues where an earlier one stopped.
set -u
smollm2=${1:?folder of SmolLM2-135M-Instruct}
gemma=${2:?folder of Gemma 3 270M}
out=${3:?folder for results}
mkdir -p "$out"
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}"
accuracy="python3 -W ignore $here/experiments/accuracy.py run --device cuda"
on_smollm2="$accuracy --model $smollm2 --name smollm2"
on_gemma="$accuracy --model $gemma --name gemma3-270m --bos --window 512 --batch 16"
tasks=blimp:3350,step_inference:400,goal_inference:400,phrase_relatedness,bigbench_social_iqa:400,quartz:400,implicatures,winowhy:400
step() {
    name=$1 limit=$2
    shift 2
    echo "== $(date +%T) $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit code $?"
    tail -n 2 "$out/$name.log"
}
step gemma_texts 150 $on_gemma --set table4 --set no_feedback --windows 16 --world-sizes 2,4,8 --out "$out/gemma.jsonl"
step gemma_table8 150 $on_gemma --set table8 --set table8_8bit --texts wikitext2_test_raw.txt --windows 8 --world-sizes 2,4,8 --out "$out/gemma_table8.jsonl"
step gemma_gsm8k 60 $on_gemma --set table5 --texts gsm8k --windows 64 --world-sizes 2,4,8 --out "$out/gemma_gsm8k.jsonl"
step gemma_tasks 150 python3 -W ignore -m echoreduce evaluate "$gemma" --tasks "$tasks" -P 4 --preset int8 --preset default --device cuda \
    --batch-tokens 4096 --out "$out/gemma_tasks.jsonl"
step smollm2_gsm8k 60 $on_smollm2 --set table5 --texts gsm8k --windows 256 --window 384 --batch 32 --world-sizes 2,4,8 --out "$out/gsm8k.jsonl"
step smollm2_claims 120 $on_smollm2 --set claims --texts wikitext2_test_raw.txt --windows 64 --batch 16 --world-sizes 2,4,8 --out "$out/claims.jsonl"
step smollm2_tasks 300 python3 -m echoreduce evaluate "$smollm2" --tasks "$tasks" -P 4 --preset fast --preset paper --preset no_feedback \
    --preset accurate --device cuda --batch-tokens 16384 --prefix-token "<|endoftext|>" --out "$out/tasks.jsonl"
