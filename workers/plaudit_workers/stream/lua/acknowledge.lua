#!lua flags=allow-oom
-- The client has the results of groups for good. By: client; with no group it is the session's sign of life.
-- ARGV: '', session, epoch, then group and entry of the results of each.
-- Checks: no later client; the entry is the group's.
-- Changes: deletes the results; remembers the 10,000 groups acknowledged last, so that they are not scored again. Of a
--   shared session (opened by the call `shared`) none is remembered: an id that is submitted later is scored again.
-- Returns: acknowledged | stale | unknown; for a repeat the same.
local session = ARGV[2]
local refused = refusal(session, ARGV[3])
if refused then return refused end
touch(session)
local shared = redis.call('HGET', session_key(session), 'opened') == 'shared'
local groups, returned, done = session_key(session, 'groups'), session_key(session, 'returned'), 0
for i = 4, #ARGV, 2 do
  local known = redis.call('HGET', groups, ARGV[i])
  if known and words(known)[2] == ARGV[i + 1] then
    redis.call('XDEL', session_key(session, 'results'), ARGV[i + 1])
    redis.call('HDEL', groups, ARGV[i])
    done = done + 1
    if not shared then redis.call('ZADD', returned, now_text, ARGV[i]) end
  end
end
if done > 0 then count('returned', done) end
if #ARGV > 3 and not shared then redis.call('ZREMRANGEBYRANK', returned, 0, -10001) end
return 'acknowledged'
