# bash drop_trial/run.sh OUT: the trial (112 s), then GPU tests of dropout and bias side by side (50 s)
out=$1; mkdir -p $out
python3 drop_trial/trial.py --out $out --seconds 114 --compile-seconds 80
export PYTHONPATH=.
t() { timeout 48 python3 -m pytest -q -x -m gpu -p no:cacheprovider "$2" -k "$3" > $out/test-$1.log 2>&1; echo "tests $1: rc $? $(tail -1 $out/test-$1.log)"; }
F=tests/kernels/gluon/test_attention_fwd.py; B=tests/kernels/gluon/test_attention_bwd.py
t words tests/kernels/gluon/test_dropout.py "" &
t fwd-bias $F "bias" &
t fwd-drop $F "dropout or everything_dropped" &
t bwd-bias $B "float64 and bias" &
t bwd-drop $B "float64 and dropout" &
wait
