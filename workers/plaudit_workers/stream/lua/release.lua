#!lua flags=allow-oom
-- Releases a group that is past its deadline. By: trainer, for each such group.
-- ARGV: group, call, incarnation, scoring of a sample given up, then (for phase group_scoring) outcome and scoring of
--   each index, as it is without its group-scope scorers.
-- Checks: no later trainer; the deadline is armed and past; the phase is open or group_scoring.
-- Changes: samples that are not terminal become given_up, or the given results replace the scores; completes the group.
-- Returns: released | not_due | stale; for the same call the same while the group lives.
local call = ARGV[2]
if stale(ARGV[3]) then return 'stale' end
local g = look(0)
if redis.call('HGET', group, 'released') == call then return 'released' end
local deadline = tonumber(redis.call('ZSCORE', open_groups, id) or 'inf')
if not g.phase or deadline > now then return 'not_due' end
if g.phase == 'open' then
  redis.call('HSET', group, 'released', call)
  finish_missing(g, call, 'given_up', ARGV[4])
  complete(g)
elseif g.phase == 'group_scoring' and ARGV[5] then
  retire('groups', redis.call('HGET', group, 'entry'))
  redis.call('HSET', group, 'released', call)
  regrade(g, ARGV, 5)
else
  return 'not_due'
end
return 'released'
