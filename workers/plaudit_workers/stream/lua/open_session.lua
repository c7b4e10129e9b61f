#!lua flags=allow-oom
-- A client goes by a session's name from now on. By: client, when it starts, and when its session is unknown.
-- ARGV: '', call, session, floor (the epoch that it had before; a FLUSHALL cannot lower it), keep_s (the session and its
--   results are kept so long without a sign of its client).
-- Changes: the epoch becomes the server's time in microseconds, or one more than it and floor if they are later; older
--   clients of that name are refused, also those that opened it before a FLUSHALL.
-- Returns: the epoch; for the same call the same.
local about = session_key(ARGV[3])
if redis.call('HGET', about, 'opened') ~= ARGV[2] then
  local before = math.max(tonumber(redis.call('HGET', about, 'epoch') or 0), tonumber(ARGV[4]))
  local epoch = math.max(before + 1, math.floor(now * 1000000))
  redis.call('HSET', about, 'epoch', epoch, 'opened', ARGV[2], 'keep_s', ARGV[5])
end
touch(ARGV[3])
return tonumber(redis.call('HGET', about, 'epoch'))
