#!lua flags=allow-oom
-- Looks for what is overdue. By: trainer, about once a second; clients of a scoring service, every second or two.
-- ARGV: '', steady time that the caller expects, the earliest and latest that it may be (empty: it has not looked before),
--   most of each to return.
-- Deadlines lapse by steady time: the server's clock without its steps, whose sum is leases.shift. A steady time that the
--   caller does not expect is a further step, and so is a gap of half a minute since anybody looked, for a caller that
--   cannot know better. A step is noted once, whoever finds it first.
-- Changes: after a step every deadline and expiry that is running moves by as much; notes when somebody looked last.
-- Returns: the steady time, groups that are overdue, sessions that have expired.
local expected, earliest, latest, most = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local looks = prefix .. 'leases'
local stored = redis.call('HMGET', looks, 'shift', 'looked')
-- Redis has lost the shift, and with it the deadlines that it moved.
local shift = tonumber(stored[1]) or expected and now - expected or 0
local steady = now - shift
local looked, step = tonumber(stored[2]) or steady, 0
if expected then
  if steady < earliest or steady > latest then step = steady - expected end
elseif steady < looked - 2 or steady > looked + 30 then
  step = steady - looked
end
if step ~= 0 then
  for _, moved in ipairs({open_groups, sessions}) do
    local running = redis.call('ZRANGEBYSCORE', moved, '-inf', '(+inf', 'WITHSCORES')
    for i = 1, #running, 2 do redis.call('ZADD', moved, stamp(running[i + 1] + step), running[i]) end
  end
  shift = shift + step
  count('clock_steps')
end
redis.call('HSET', looks, 'shift', stamp(shift), 'looked', stamp(now - shift))
return {stamp(now - shift), redis.call('ZRANGEBYSCORE', open_groups, '-inf', now_text, 'LIMIT', 0, most),
  redis.call('ZRANGEBYSCORE', sessions, '-inf', now_text, 'LIMIT', 0, most)}
