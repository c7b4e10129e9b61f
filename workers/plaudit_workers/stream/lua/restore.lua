#!lua flags=allow-oom
-- Puts the ledger of a checkpoint in the place of Redis's counters. By: trainer, when it resumes.
-- ARGV: '', incarnation, step, then name and value of each counter.
-- Checks: no later trainer. Changes: admitted, trained, evaluated, dropped, dropped:<reason>, step; nothing else.
-- Returns: restored | stale.
if stale(ARGV[2]) then return 'stale' end
for _, name in ipairs(redis.call('HKEYS', counters)) do
  if name == 'admitted' or name == 'trained' or name == 'evaluated' or string.match(name, '^dropped') then
    redis.call('HDEL', counters, name)
  end
end
redis.call('HSET', state, 'step', ARGV[3])
for i = 4, #ARGV, 2 do redis.call('HSET', counters, ARGV[i], ARGV[i + 1]) end
return 'restored'
