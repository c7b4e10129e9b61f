#!lua flags=allow-oom
-- One exchange of a worker with a budget: what it has in flight, what its requests really cost, what waits to begin.
-- By: the limiter of each reward worker, as often as it has something to say, and every few seconds.
--
-- KEYS[1]: prefix of the budget's keys, which share a hash tag.
--   :log (zset) request → µs at which it was sent (until that is known: let through), server's clock. What is older
--     than the window is forgotten.
--   :tokens (hash) request → tokens reserved or used, and their 'sum'.
--   :workers (hash) worker → what it has in flight, and until when that counts without a word from it; its requests in
--     the log; how many wait, since when, and until when their place in line is kept.
-- ARGV: worker, window and lease in µs, the most requests and tokens a window and requests at a time (0 = no limit),
--   requests in flight, how many wait, how many are settled; for each settled request, tokens (-1 = it was never sent,
--   -2 = as reserved) and µs since it was sent (-1 = at once); for each of the first that wait request and tokens.
-- Checks: no window ever holds more than the limits. Among workers that wait, the one that had least goes first: what
--   is free is kept for those that are behind, for as long as they come when they were told to.
-- Returns: how many of those that wait may begin, from the first on; µs after which to come again, 0 = all may.
-- Sent twice: requests that are in the log were let through and take nothing more.
local log, tokens, workers = KEYS[1] .. ':log', KEYS[1] .. ':tokens', KEYS[1] .. ':workers'
local name, window, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most_requests, most_tokens, most_in_flight = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local rated = most_requests > 0 or most_tokens > 0
local first_settled, num_settled = 10, tonumber(ARGV[9])
local first_waiting = first_settled + 3 * num_settled
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local evicted_at_a_time, soonest, latest, poll, grace = 2000, 20000, 500000, 50000, 1000000
local apart = 5000 -- so that those that wait ask 200 times a second in all, however many they are

local known, in_flight, crowd = {}, 0, 0
local stored = redis.call('HGETALL', workers)
for i = 1, #stored, 2 do
  local it = cmsgpack.unpack(stored[i + 1])
  if it.lease < now then it.in_flight, it.waiting = 0, 0 end
  if it.back < now then it.waiting = 0 end
  known[stored[i]] = it
  if stored[i] ~= name then
    in_flight = in_flight + it.in_flight
    if it.waiting > 0 then crowd = crowd + 1 end
    if it.lease < now and it.passed <= 0 then redis.call('HDEL', workers, stored[i]) end
  end
end
local me = known[name] or {passed = 0, waiting = 0, since = now}
known[name] = me
me.in_flight, me.lease = tonumber(ARGV[7]), now + lease
if me.waiting == 0 then me.since = now end

local sum, num_requests = tonumber(redis.call('HGET', tokens, 'sum') or 0), redis.call('ZCARD', log)

local function forget(request)
  if redis.call('ZREM', log, request) == 0 then return end
  num_requests = num_requests - 1
  sum = sum - (redis.call('HGET', tokens, request) or 0)
  redis.call('HDEL', tokens, request)
  local owner = string.match(request, '@(.*)$')
  if known[owner] then
    known[owner].passed = known[owner].passed - 1
    if owner ~= name then redis.call('HSET', workers, owner, cmsgpack.pack(known[owner])) end
  end
end

for _, request in ipairs(redis.call('ZRANGEBYSCORE', log, '-inf', now - window, 'LIMIT', 0, evicted_at_a_time)) do
  forget(request)
end
for i = first_settled, first_waiting - 1, 3 do
  local request, cost, ago = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  if cost == -1 then
    forget(request)
  elseif redis.call('ZSCORE', log, request) then
    if ago >= 0 then redis.call('ZADD', log, 'GT', now - ago, request) end
    if cost >= 0 then
      sum = sum + cost - (redis.call('HGET', tokens, request) or 0)
      redis.call('HSET', tokens, request, cost)
    end
  end
end

-- How many requests of this cost fit now.
local function room(cost)
  local free = math.huge
  if most_requests > 0 then free = math.min(free, most_requests - num_requests) end
  if most_in_flight > 0 then free = math.min(free, most_in_flight - in_flight - me.in_flight) end
  if most_tokens > 0 then
    -- What costs more than the whole budget passes when nothing else is in the window.
    local need = math.max(1, math.min(cost, most_tokens))
    free = math.min(free, math.floor((most_tokens - sum) / need))
  end
  return free
end

-- How many requests the others that wait may have before this worker's next.
local function behind()
  local mine, due = rated and me.passed or me.in_flight, 0
  for other, it in pairs(known) do
    if other ~= name and it.waiting > 0 then
      local theirs = rated and it.passed or it.in_flight
      due = due + math.max(0, math.min(it.waiting, mine - theirs + (it.since < me.since and 1 or 0)))
    end
  end
  return due
end

local passed, again = 0, 0
for i = first_waiting, #ARGV, 2 do
  local request, cost = ARGV[i], tonumber(ARGV[i + 1])
  if not (rated and redis.call('ZSCORE', log, request)) then
    local free = room(cost)
    if free < 1 then
      local oldest = rated and redis.call('ZRANGE', log, 0, 0, 'WITHSCORES') or {}
      local full = (most_requests > 0 and num_requests >= most_requests) or (most_tokens > 0 and sum > 0)
      again = full and oldest[2] and tonumber(oldest[2]) + window - now or poll
      if most_in_flight > 0 and in_flight + me.in_flight >= most_in_flight then again = math.min(again, poll) end
      again = math.min(math.max(again, soonest), latest)
      break
    end
    if free <= behind() then again = soonest break end
    if rated then
      redis.call('ZADD', log, now, request)
      if cost > 0 then redis.call('HSET', tokens, request, cost) end
      num_requests, sum, me.passed = num_requests + 1, sum + cost, me.passed + 1
    end
    me.since = now
  end
  passed, me.in_flight = passed + 1, me.in_flight + 1
end

if again > 0 then again = math.max(again, crowd * apart) end
me.waiting = tonumber(ARGV[8]) - passed
me.back = now + again + grace
redis.call('HSET', workers, name, cmsgpack.pack(me))
if rated then redis.call('HSET', tokens, 'sum', sum) end
local ttl = math.ceil((window + lease) / 1000)
for _, key in ipairs({log, tokens, workers}) do redis.call('PEXPIRE', key, ttl) end
return {passed, again}
