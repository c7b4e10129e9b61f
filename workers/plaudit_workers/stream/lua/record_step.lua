#!lua flags=allow-oom
-- Records a closed step. By: trainer.
-- ARGV: '', call, incarnation, step, record.
-- Checks: no later trainer. Changes: state.step; one event; drops events that are older than a day.
-- Returns: recorded | stale; a repeat adds no event.
if stale(ARGV[3]) then return 'stale' end
if redis.call('HGET', state, 'recorded') ~= ARGV[2] then
  redis.call('HSET', state, 'step', ARGV[4], 'recorded', ARGV[2])
  redis.call('XADD', prefix .. 'events', '*', 'kind', 'step', 'step', ARGV[4], 'record', ARGV[5])
  redis.call('XTRIM', prefix .. 'events', 'MINID', '~', math.floor((now - 86400) * 1000))
end
return 'recorded'
