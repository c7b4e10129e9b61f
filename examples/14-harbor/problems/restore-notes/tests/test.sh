# 1 if the notes are back, word for word.
reward=0
[ "$(head -c 1000 notes.txt)" = "The key is under the third stone." ] && reward=1
echo $reward > /logs/verifier/reward.txt
