#!/bin/sh
# What docs/accuracy.md and docs/tasks.md say of Gemma 3 270M, of GSM8K solutions, of Table 8 on all texts and of other presets on tasks, on one GPU, in one command:
#
#     ECHOREDUCE_DATA=DATA sh experiments/one_gpu.sh SMOLLM2_FOLDER GEMMA_FOLDER docs/results [smollm2_table8 gemma_tasks ...]
#
# With names of steps behind the folders only those. Two lanes share the GPU, one a model (it is no faster than one after the other, but each
# has something when time ends). A step continues where an earlier one stopped: what its file in the result folder holds already is
# skipped. LIMIT (default 570) is the most seconds a lane may take; all of it takes about fifty minutes.
set -u
smollm2=${1:?folder of SmolLM2-135M-Instruct}
gemma=${2:?folder of Gemma 3 270M}
out=${3:?folder for results}
shift 3
chosen=" $* "
device=${DEVICE:-cuda}
logs=${LOGS:-$out/logs}
end=$(($(date +%s) + ${LIMIT:-570}))
mkdir -p "$out" "$logs"
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
python=${PYTHON:-python3}
accuracy="$python -W ignore $here/experiments/accuracy.py run --device $device --world-sizes 4,2,8"
on_smollm2="$accuracy --model $smollm2 --name smollm2"
on_gemma="$accuracy --model $gemma --name gemma3-270m --bos --window 512 --batch 8"
evaluate="$python -W ignore -m echoreduce evaluate"
wikitext2="--texts wikitext2_test_raw.txt"
others="--texts owt_1000_snippets.txt wikipedia_1000_snippets.txt jane_austen_6_novels.txt"
bigbench=general_knowledge,hyperbaton,implicatures,nonsense,phrase_relatedness,physical_intuition,physics,similarities,strategyqa,quartz
short_tasks=blimp:13400,goal_inference,step_inference,social_iqa,$bigbench
long_tasks=abstract_narrative:400,timedial:300,intent_recognition:350,elementary_math:500,1_digit,2_digit,3_digit,step_ordering
long_tasks=$long_tasks,winowhy,socialiqa
gemma_tasks=blimp:6700,abstract_narrative:100,timedial:100,intent_recognition:100,elementary_math:300,1_digit,2_digit:200,3_digit:200
gemma_tasks=$gemma_tasks,goal_inference:500,step_inference:500,step_ordering:500,social_iqa:500,winowhy:500,socialiqa:1112,$bigbench

step() {
    name=$1
    shift
    case "$chosen" in "  " | *" $name "*) ;; *) return ;; esac
    left=$((end - $(date +%s)))
    [ "$left" -gt 5 ] || { echo "$name: no time left"; return; }
    echo "== $(date +%T) $name"
    timeout "$left" "$@" >>"$logs/$name.log" 2>&1 || echo "$name: exit code $?"
    echo "== $(date +%T) $name ends"
}
smollm2() {
    step smollm2_whole $on_smollm2 --set table4 --only default --batch 32 --out "$out/accuracy_smollm2_whole.jsonl"
    step smollm2_gsm8k $on_smollm2 --set table5 --texts gsm8k --windows 512 --window 384 --batch 32 \
        --out "$out/accuracy_smollm2_gsm8k.jsonl"
    step smollm2_claims $on_smollm2 --set claims $wikitext2 --windows 32 --batch 16 --group 10 --out "$out/accuracy_smollm2_claims.jsonl"
    step smollm2_table8 $on_smollm2 --set table8 --set table8_8bit $others --windows 8 --group 22 --out "$out/accuracy_smollm2_table8_texts.jsonl"
    for presets in "--preset accurate --preset fast" "--preset paper --preset no_feedback"; do
        for part in "-P 4 --tasks $short_tasks,$long_tasks" "-P 2 --tasks $short_tasks,$long_tasks" "-P 8 --tasks $short_tasks,$long_tasks"; do
            step smollm2_tasks $evaluate "$smollm2" $part $presets --device $device --batch-tokens 16384 --prefix-token "<|endoftext|>" \
                --out "$out/tasks_smollm2.jsonl"
        done
    done
}
gemma() {
    step gemma_gsm8k $on_gemma --set table5 --texts gsm8k --windows 256 --batch 16 --out "$out/accuracy_gemma3_270m_gsm8k.jsonl"
    step gemma_gsm8k $on_gemma --set no_feedback --only "off 6 bits g64" --texts gsm8k --windows 256 --batch 16 \
        --out "$out/accuracy_gemma3_270m_gsm8k.jsonl"
    step gemma_table4 $on_gemma --set table4 --windows 32 --out "$out/accuracy_gemma3_270m.jsonl"
    step gemma_bits $on_gemma --set no_feedback --only "bits g64" --windows 32 --out "$out/accuracy_gemma3_270m.jsonl"
    step gemma_table8 $on_gemma --set table8 --set table8_8bit $wikitext2 --windows 16 --out "$out/accuracy_gemma3_270m_table8.jsonl"
    step gemma_table8 $on_gemma --set table8 --set table8_8bit $others --windows 16 --out "$out/accuracy_gemma3_270m_table8_texts.jsonl"
    step gemma_tasks $evaluate "$gemma" --tasks "$gemma_tasks" -P 4 -P 2 -P 8 --preset default \
        --config "$here/experiments/six_bits_rotated.json" --device "$device" --batch-tokens 8192 --out "$out/tasks_gemma3_270m.jsonl"
    step gemma_presets $evaluate "$gemma" --tasks "$gemma_tasks" -P 4 -P 2 -P 8 --preset accurate --preset fast --preset paper --preset no_feedback \
        --device "$device" --batch-tokens 8192 --out "$out/tasks_gemma3_270m.jsonl"
}
smollm2 &
gemma &
wait
