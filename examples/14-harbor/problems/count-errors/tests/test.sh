# 1 if the file errors holds the number, else 0.
reward=0
[ "$(head -c 100 errors)" = 2 ] && reward=1
echo "errors holds: $(head -c 100 errors)"
echo $reward > /logs/verifier/reward.txt
