# bash drop_trial/run2.sh OUT [trial] [tests] [stress]: trial 125 s, tests 65 s, stress 75 s
out=$1; shift; mkdir -p $out; what="${*:-trial tests stress}"
export PYTHONPATH=.
case $what in *trial*) python3 drop_trial/trial.py --out $out --seconds 125;; esac
t() { timeout 65 python3 -m pytest -q -m gpu -p no:cacheprovider "$2" -k "$3" > $out/test-$1.log 2>&1; echo "tests $1: rc $? $(tail -1 $out/test-$1.log)"; }
F=tests/kernels/gluon/test_attention_fwd.py; B=tests/kernels/gluon/test_attention_bwd.py
case $what in *tests*)
t words tests/kernels/gluon/test_dropout.py "" &
t fwd-bias $F "bias" &
t fwd-drop $F "dropout or everything" &
t bwd-bias $B "float64 and bias_d" &
t bwd-bias2 $B "float64 and (bias_of_keys or bias_packed) and not wide" &
t bwd-drop $B "float64 and dropout_d" &
t bwd-drop2 $B "float64 and (dropout_packed or dropout_of) and not wide" &
t bwd-mixed $B "float64 and mixed_d" &
t bwd-wide-bias $B "float64 and wide_bias" &
t bwd-wide-drop $B "float64 and wide_drop" &
t bwd-wide-mixed $B "float64 and wide_mixed" &
wait;; esac
case $what in *stress*)
python3 benchmarks/stress_kernels.py --seconds 72 --lanes 4 --runs 100000 --most-seconds 5 --json $out/stress_drop.json \
  --cases forward/bias forward/dropout backward/dropout backward/bias backward/mixed_d backward_in_order/dropout \
  backward_in_order/bias backward/wide_dropout backward/wide_mixed | tail -25;; esac
