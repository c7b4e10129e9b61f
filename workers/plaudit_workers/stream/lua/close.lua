#!lua flags=allow-oom
-- Ends a group. By: trainer, after the update or the drop; the only transition that counts an end.
-- ARGV: group, call (a number, each higher than the last), incarnation, end (trained | evaluated | dropped), reason, scoring of a sample given up, record (of the
--   group, for the metrics; may be empty), taken (1: this trainer was given it in phase ready, or has ended it
--   before).
-- Checks: no later trainer; the group exists; trained and evaluated only from phase ready, or when it was taken
--   so: an older state of Redis does not change what was trained.
-- Changes: samples that are not terminal become given_up; counts the end; acks `ready`; deletes the group.
-- Returns: closed | unknown | not_ready | stale; for the same call the same.
local call, incarnation, ending = ARGV[2], ARGV[3], ARGV[4]
if stale(incarnation) then return 'stale' end
local g = look(0)
if not g.phase then
  return tonumber(redis.call('ZSCORE', prefix .. 'closed', id) or 0) == tonumber(call) and 'closed' or 'unknown'
end
if ending ~= 'dropped' and g.phase ~= 'ready' and ARGV[8] ~= '1' then return 'not_ready' end
if g.phase == 'open' then
  finish_missing(g, 'close', 'given_up', ARGV[6])
  report(g)
elseif g.phase == 'group_scoring' then
  retire('groups', redis.call('HGET', group, 'entry'))
  report(g)
else
  retire('ready', redis.call('HGET', group, 'entry'))
end
count(ending)
if ending == 'dropped' then count('dropped:' .. ARGV[5]) end
count('open:' .. g.split, -1)
if ARGV[7] ~= '' then
  redis.call('XADD', prefix .. 'events', '*', 'kind', 'group', 'group', id, 'record', ARGV[7])
end
redis.call('UNLINK', group)
redis.call('ZREM', open_groups, id)
redis.call('ZADD', prefix .. 'closed', call, id)
redis.call('ZREMRANGEBYRANK', prefix .. 'closed', 0, -1025)
return 'closed'
