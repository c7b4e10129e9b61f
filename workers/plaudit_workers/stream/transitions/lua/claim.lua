#!lua flags=allow-oom
-- Takes entries that were delivered already. By: any consumer, on start, after a reconnect, and every second or so.
-- ARGV: '', stream, consumer, count, lease in milliseconds (-1: others' entries are left alone), pause between looks in
--   seconds, earliest and latest time of this server that the caller expects (empty: any), count from which an entry is
--   worked alone, poison limit, then the entries that this consumer has in work.
-- Changes: entries of others whose lease has lapsed become this consumer's, count + 1. Of those to be worked alone it has
--   at most one; those past the limit, which are only to be buried, apart. Only this counts a delivery: Redis's own count
--   grows with every look. Who took a sample first, and who lost it when, is noted in its group.
-- One look at all pending entries serves every consumer: within a pause after it others are answered without one, unless
--   it found more than its caller could take (leases, field <stream>).
-- Leases are measured with the server's clock. A time outside what the caller expects is a step of that clock: for one
--   lease nothing is taken from others (leases, field stepped), and leases that seem to begin in the future begin now.
-- Returns: time of this server, then {entry, deliveries} of at most `count`: first those pending for this consumer that
--   it does not work on (a reply that was lost). Their payloads are read apart: all together may not arrive in time.
local name, consumer, wanted, lease = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local pause, earliest, latest = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local alone_from, limit, suspects = tonumber(ARGV[9]), tonumber(ARGV[10]), 0
local stream, reader, working, taken = prefix .. name, readers[name], {}, {}
local looks, most = prefix .. 'leases', 10000
for i = 11, #ARGV do working[ARGV[i]] = true end

local function suspect(deliveries)
  return deliveries >= alone_from and deliveries <= limit
end

local function found(entry)
  local fields = redis.call('XRANGE', stream, entry, entry)[1]
  if not fields then redis.call('XACK', stream, reader, entry) end
  return fields and fields[2]
end

-- Whether leases can be compared with the clock now, and this caller is to look.
local function due()
  if lease < 0 then return false end
  if earliest and now < earliest then
    for _, entry in ipairs(redis.call('XPENDING', stream, reader, '-', '+', most)) do
      if entry[3] == 0 then redis.call('XCLAIM', stream, reader, entry[2], 0, entry[1], 'JUSTID') end
    end
  end
  if earliest and (now < earliest or now > latest) then
    redis.call('HSET', looks, 'stepped', stamp(now))
    count('clock_steps')
  end
  local stepped = tonumber(redis.call('HGET', looks, 'stepped') or '-inf')
  if stepped <= now and now - stepped < lease / 1000 then return false end
  local last = tonumber(redis.call('HGET', looks, name) or '-inf')
  return pause == 0 or last > now or now - last >= pause
end

for _, entry in ipairs(redis.call('XPENDING', stream, reader, '-', '+', wanted + #ARGV, consumer)) do
  if suspect(entry[4]) then suspects = suspects + 1 end
  if #taken < wanted and not working[entry[1]] and found(entry[1]) then taken[#taken + 1] = {entry[1], entry[4]} end
end
if due() then
  for _, entry in ipairs(redis.call('XPENDING', stream, reader, 'IDLE', lease, '-', '+', most)) do
    local deliveries = entry[4] + 1
    local held = entry[2] == consumer or working[entry[1]]  -- lost and not yet told so: its next renewal comes first
    if #taken < wanted and not held and not (suspect(deliveries) and suspects > 0) then
      local fields = found(entry[1])
      if fields then
        redis.call('XCLAIM', stream, reader, consumer, 0, entry[1], 'RETRYCOUNT', deliveries, 'JUSTID')
        taken[#taken + 1] = {entry[1], deliveries}
        if suspect(deliveries) then suspects = suspects + 1 end
      end
      if fields and deliveries > 1 then
        count('redelivered:' .. name)
        local about = words(fields[2])
        if name == 'samples' and about[2] then note_first(about[1], about[2], entry[3] / 1000, entry[2]) end
        if about[1] then note_loss(about[1], entry[1], entry[3] / 1000, entry[2]) end
      end
    end
  end
  if pause > 0 and #taken < wanted then
    redis.call('HSET', looks, name, stamp(now))
  else
    redis.call('HDEL', looks, name)
  end
end
table.insert(taken, 1, stamp(now))
return taken
