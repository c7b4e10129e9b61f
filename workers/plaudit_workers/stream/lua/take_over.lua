#!lua flags=allow-oom
-- A trainer takes over the run. By: trainer, once, when it starts.
-- ARGV: '', call, floor (the incarnation that its checkpoint knows: a FLUSHALL cannot lower it).
-- Changes: incarnation + 1; every deadline that is running starts anew, for there was no trainer to keep it, and counts as
--   looked at now (overdue).
-- Returns: the incarnation; for one of the last 16 calls again what it was (a copy that a slow network delivers late must
--   not replace the trainer that came after).
local KEPT = 16
local calls = {}
for call, given in string.gmatch(redis.call('HGET', state, 'takeovers') or '', '(%S+)=(%d+)') do
  if call == ARGV[2] then return tonumber(given) end
  calls[#calls + 1] = call .. '=' .. given
end
local incarnation = math.max(tonumber(redis.call('HGET', state, 'incarnation') or 0), tonumber(ARGV[3])) + 1
calls[#calls + 1] = ARGV[2] .. '=' .. incarnation
redis.call('HSET', state, 'incarnation', incarnation,
  'takeovers', table.concat(calls, ' ', math.max(1, #calls - KEPT + 1)))
for _, member in ipairs(redis.call('ZRANGEBYSCORE', open_groups, '-inf', '(+inf')) do
  local f = redis.call('HMGET', prefix .. 'group:' .. member, 'phase', 'deadline_s', 'scoring_s')
  local allowed = f[1] == 'group_scoring' and f[3] or f[2]
  if allowed then redis.call('ZADD', open_groups, stamp(now + allowed), member) end
end
redis.call('HDEL', prefix .. 'leases', 'looked')
return incarnation
