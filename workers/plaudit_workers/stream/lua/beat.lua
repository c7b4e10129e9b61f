#!lua flags=allow-oom
-- Notes that a process lives. By: every process, every 5 s.
-- ARGV: '', worker, record. Changes: `workers`, `workers:records`; forgets who was not heard for ten minutes.
-- Returns: nothing.
redis.call('ZADD', prefix .. 'workers', now_text, ARGV[2])
redis.call('HSET', prefix .. 'workers:records', ARGV[2], ARGV[3])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'workers', '-inf', stamp(now - 600))) do
  redis.call('ZREM', prefix .. 'workers', gone)
  redis.call('HDEL', prefix .. 'workers:records', gone)
end
return false
