#!lua flags=allow-oom
-- Ends a session with all that is left of it. By: its client; without an epoch any client, once it has expired.
-- ARGV: '', session, epoch (may be empty), groups to end in one call (many at once would hold up everybody).
-- Checks: no later client; or that the session has expired.
-- Changes: deletes its groups (who reads or scores their samples is told that they are not needed), results and names;
--   their room is free again, also when the client comes back before the last call.
-- Returns: ended | more (call again) | not_due | stale; for a repeat the same.
local session = ARGV[2]
if ARGV[3] == '' then
  local expires = tonumber(redis.call('ZSCORE', sessions, session) or 0)
  if expires > now then return 'not_due' end
elseif refusal(session, ARGV[3]) == 'stale' then
  return 'stale'
end
local groups = session_key(session, 'groups')
for _, member in ipairs(redis.call('HRANDFIELD', groups, ARGV[4])) do
  local n = redis.call('HGET', prefix .. 'group:' .. member, 'n')
  if n then count_in_work(session, -n) end
  redis.call('UNLINK', prefix .. 'group:' .. member)
  redis.call('ZREM', open_groups, member)
  redis.call('HDEL', groups, member)
  count('abandoned')
end
if redis.call('HLEN', groups) > 0 then return 'more' end
redis.call('UNLINK', session_key(session), groups, session_key(session, 'results'), session_key(session, 'returned'))
redis.call('ZREM', sessions, session)
redis.call('ZREM', session_key(owner_of(session), 'waiting'), session)
return 'ended'
