#!lua flags=allow-oom
-- The client has the results of groups for good. By: client; with no group it is the session's sign of life.
-- ARGV: '', session, epoch, then group and entry of the results of each.
-- Checks: no later client; the entry is the group's.
-- Changes: deletes the results; remembers the 10,000 groups acknowledged last, so that they are not scored again. Of a
--   shared session (opened by the call `shared`) none is remembered: an id that is submitted later is scored again.
-- Returns: acknowledged | stale | unknown; for a repeat the same.
local session = ARGV[2]
local refused, shared = refusal(session, ARGV[3])
if refused then return refused end
touch(session)
local groups, returned, done = session_key(session, 'groups'), session_key(session, 'returned'), 0
for first = 4, #ARGV, 1000 do
  local last, names, ended, entries = math.min(first + 999, #ARGV), {}, {}, {}
  for i = first, last, 2 do names[#names + 1] = ARGV[i] end
  local known = redis.call('HMGET', groups, unpack(names))
  for i = first, last, 2 do
    local about = known[(i - first) / 2 + 1]
    if about and words(about)[2] == ARGV[i + 1] then
      ended[#ended + 1], entries[#entries + 1] = ARGV[i], ARGV[i + 1]
      if not shared then redis.call('ZADD', returned, now_text, ARGV[i]) end
    end
  end
  if #ended > 0 then
    redis.call('XDEL', session_key(session, 'results'), unpack(entries))
    done = done + redis.call('HDEL', groups, unpack(ended))
  end
end
if done > 0 then count('returned', done) end
if #ARGV > 3 and not shared then redis.call('ZREMRANGEBYRANK', returned, 0, -10001) end
return 'acknowledged'
