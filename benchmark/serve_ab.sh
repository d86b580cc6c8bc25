#!/usr/bin/env bash
# Stock SGLang and SGLang with the plugin, one server after the other on this machine, the same questions to both.
#
#   benchmark/serve_ab.sh --out DIR [--stock FOLDER] [--shape "14 64 2 32 4 8"] [--step full|target] [--tp 1]
#                         [--rounds 1] [--timeout 600] [--port 30000] [-- options of bench_gsm8k.py]
#   benchmark/serve_ab.sh --out DIR --model DIR --draft DIR --tp 4 [...]
#
# Without --model: random weights at Muse Spark's sizes, in folders that stock_models.py writes from the shape
# "layers experts top-k heads kv-heads width"; the default is 14 layers with one rank of four on every GPU (--tp 1, 2 or
# 4). The plugin runs on several GPUs only with SGLANG_MUSE_MEGA_EXPERIMENTAL_TP=1, which must be set for --tp above 1.
# --stock is the folder of SGLang's packages for machines without network; leave it out where SGLang is installed and
# --model is given. --draft "" decodes without a draft. Servers listen on 127.0.0.1 alone, and end with this script.
# DIR gets every server's log, every benchmark's record and, last, compare.json. Exit status 1 when a server did not
# come up in time or ended, or a benchmark failed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
out='' stock='' model='' draft=none shape='' step=full tp=1 rounds=1 timeout=600 port=30000
while [ $# -gt 0 ]; do
    case $1 in
        --out | --stock | --model | --draft | --shape | --step | --tp | --rounds | --timeout | --port)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        --help | -h) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"; exit 0 ;;
        --) shift; break ;;
        *) echo "error: unknown option $1; see the head of $0" >&2; exit 2 ;;
    esac
done
[ -n "$out" ] || { echo "error: --out is missing; see the head of $0" >&2; exit 2; }
[ -n "$model$stock" ] || { echo "error: give --model, or --stock for random weights" >&2; exit 2; }

for number in tp rounds timeout port; do
    [[ ${!number} =~ ^[1-9][0-9]*$ ]] || { echo "error: --$number needs a number, not '${!number}'" >&2; exit 2; }
done
if [ "$tp" -gt 1 ] && [ "${SGLANG_MUSE_MEGA_EXPERIMENTAL_TP:-}" != 1 ]; then
    echo "error: with --tp $tp the plugin would be refused after stock was measured; set SGLANG_MUSE_MEGA_EXPERIMENTAL_TP=1" >&2
    exit 2
fi
if [ -n "$stock" ] && ! { [ -f "$stock/device.sh" ] && [ -f "$stock/make_models.py" ]; }; then
    echo "error: $stock is not the rival's folder, it lacks device.sh or make_models.py; change --stock" >&2
    exit 2
fi

[ -n "$shape" ] || shape="14 $((64 * tp)) $((2 * tp)) $((32 * tp)) $((4 * tp)) 8"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
server=''

stop_server() { # the server and all of its ranks: they are one process group
    [ -n "$server" ] || return 0
    kill -TERM -- "-$server" 2>/dev/null || true
    for _ in $(seq 50); do
        kill -0 -- "-$server" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    server=''
}
trap 'stop_server; rm -rf "$work"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

if [ -n "$stock" ]; then
    stock=$(cd "$stock" && pwd)
    export STOCK_DIR=$stock
    set -a
    # shellcheck disable=SC1091
    . "$stock/device.sh" >/dev/null
    set +a
fi
site=$work/site
mkdir "$site"
export PYTHONPATH=$site:$root:$here${PYTHONPATH:+:$PYTHONPATH}
python3 -c 'import pathlib, sys, serve_arms; serve_arms.install(pathlib.Path(sys.argv[1]))' "$site"

questions=()
common=(--tp "$tp")
if [ -z "$model" ]; then
    python3 "$here/stock_models.py" "$stock" "$work/models" "$shape"
    model=$work/models/target
    [ "$draft" != none ] || draft=$work/models/draft
    common+=(--random --width "${shape##* }")
    tokenizer=$root/sgl_muse_mega/data/tiny/target
    questions=(--api native --tokenizer "$tokenizer" --ignore-eos --max-new-tokens 128 --limit 20)
fi
[ -z "$draft" ] || [ "$draft" = none ] || common+=(--draft "$draft")

healthy() {
    python3 -c 'import sys, urllib.request as r
r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=5)' "http://127.0.0.1:$port/health" 2>/dev/null
}

start_server() { # NAME [options of serve_http.py]
    local name=$1 deadline=$((SECONDS + timeout))
    shift
    if healthy; then
        echo "error: something answers on port $port already; end it, or give another --port" >&2
        exit 1
    fi
    # shellcheck disable=SC2086
    setsid ${SERVE_AB_SERVER:-python3 "$here/serve_http.py"} --model "$model" --port "$port" "${common[@]}" "$@" \
        >"$out/$name.log" 2>&1 &
    server=$!
    until healthy; do
        if ! kill -0 "$server" 2>/dev/null; then
            echo "error: $name ended before it was up; the end of $out/$name.log:" >&2
        elif [ $SECONDS -ge $deadline ]; then
            echo "error: $name was not up after $timeout s; the end of $out/$name.log:" >&2
        else
            sleep 1
            continue
        fi
        tail -n 30 "$out/$name.log" >&2
        exit 1
    done
    echo "$name is up after $((SECONDS - deadline + timeout)) s"
}

failed=0
for round in $(seq "$rounds"); do
    for arm in stock plugin; do
        name=$arm-$round
        if [ $arm = plugin ]; then
            SGLANG_MUSE_MEGA_STEP=$step start_server "$name" --plugin
        else
            start_server "$name"
        fi
        python3 "$here/bench_gsm8k.py" --url "http://127.0.0.1:$port" --json "$out/$name.json" "${questions[@]}" "$@" ||
            failed=1
        stop_server
        if grep -q "no step runs whole" "$out/$name.log"; then
            echo "error: $name ran SGLang's own DFLASH steps" >&2
            failed=1
        fi
        grep -hE "(NVIDIA|Muse) megakernel" "$out/$name.log" | tail -n 4 | cut -c 1-400 || true
    done
done

python3 - "$out" "$rounds" <<'END'
import json, pathlib, sys
import bench_gsm8k

out, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
runs = []
for arm, name in (("stock", "A"), ("plugin", "B")):
    for turn in range(1, rounds + 1):
        path = out / f"{arm}-{turn}.json"
        runs += [run | {"server": name} for run in json.loads(path.read_text())["runs"]] if path.exists() else []
if {run["server"] for run in runs} != {"A", "B"}:
    sys.exit("error: one of the two servers was not measured")
found = bench_gsm8k.compare(runs)
(out / "compare.json").write_text(json.dumps(found, indent=1))
print("plugin over stock:", json.dumps(found))
END
exit $failed
