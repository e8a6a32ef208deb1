#!/bin/sh
# Everything that waits for a machine of several GPUs, in one command (ten to fifteen minutes; with names of steps behind the folder only those):
#
#     sh experiments/many_gpus.sh 4 results_h200x4
#     sh experiments/many_gpus.sh 2 results_h200x2 tests table2
#
# GPU tests on P ranks; the paper's Table 2 and small sizes, one-shot against two-shot; schedules of `default`; `check`; the cost model against NCCL and peer copies; the
# prefill of the paper's Table 3. Every step has a limit of its own and the next one runs whatever became of it; JSON, a picture and a log of each
# step are left in the folder.
set -u
ranks=${1:?number of GPUs}
out=${2:?folder for results}
shift 2
chosen=" $* "
mkdir -p "$out"
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}"
echoreduce="torchrun --nproc-per-node $ranks -m echoreduce"
step() {
    name=$1 limit=$2
    shift 2
    case "$chosen" in "  " | *" $name "*) ;; *) return ;; esac
    echo "== $(date +%T) $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit code $?"
    tail -n 3 "$out/$name.log"
}
step tests 300 python3 -m pytest -q -rf -p no:cacheprovider "$here/tests/gpu"
step check 60 $echoreduce check
step table2 120 $echoreduce bench --min-size 64M --max-size 1G --factor 2 --graph eager --presets no_feedback,int8,paper,fast,default \
    --algorithms two_shot --peers nccl,two_collective_8,two_collective_4 --json "$out/table2.json"
step sizes 150 $echoreduce bench --min-size 8K --max-size 1G --factor 4 --graph graph --presets no_feedback,fast,default \
    --algorithms two_shot,one_shot --peers nccl,symm_one_shot,symm_two_shot --json "$out/sizes.json" --plot "$out/time_size.png"
step schedules 120 torchrun --nproc-per-node "$ranks" "$here/experiments/p2p_variants.py" --sizes 1G,64M --algorithms two_shot --feedback float8 \
    --policy compact --group-size 64 --rotation hadamard --warps 4 --registers 0,96 --seconds 100 --out "$out/schedules.json"
step calibrate_nccl 90 $echoreduce calibrate --backend nccl -b 2M -e 128M --sweeps 9 --quietest --json "$out/calibrate_nccl.json"
step calibrate_p2p 90 python3 -m echoreduce calibrate --backend p2p -P "$ranks" -b 2M -e 128M --sweeps 9 --quietest --json "$out/calibrate_p2p.json"
# What a call adds after products of 6 ms and of 30 ms, as far apart as those of the prefill: links that sleep meanwhile would show.
step gap_short 60 torchrun --nproc-per-node "$ranks" "$here/experiments/critical_path.py" --states float8_e4m3 --passes 4 --out "$out/gap_short.json"
step gap_long 90 torchrun --nproc-per-node "$ranks" "$here/experiments/critical_path.py" --tokens 131072 --hidden 4096 --inner 20480 --sites 8 \
    --states float8_e4m3 --passes 4 --out "$out/gap_long.json"
step prefill 180 torchrun --nproc-per-node "$ranks" "$here/experiments/end_to_end.py" --models llama3-8b --train-models "" --loads 0 \
    --repetitions 2 --limit-seconds 150 --out "$out/end_to_end"
