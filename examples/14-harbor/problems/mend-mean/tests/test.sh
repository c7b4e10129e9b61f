# 0.5 for each mean that was wrong before, if the one that was right still is. Numbers beside the reward become extras.
right=0 kept=0 reward=0
[ "$(python3 -I mean.py 4)" = 4.0 ] && right=$((right + 1))
[ "$(python3 -I mean.py 1 2 6)" = 3.0 ] && right=$((right + 1))
[ "$(python3 -I mean.py 1 3)" = 2.0 ] && kept=1
case $kept$right in 11) reward=0.5 ;; 12) reward=1 ;; esac
echo "{\"reward\": $reward, \"kept\": $kept}" > /logs/verifier/reward.json
