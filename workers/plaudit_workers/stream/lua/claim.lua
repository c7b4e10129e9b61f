#!lua flags=allow-oom
-- Takes entries that were delivered already. By: any consumer, on start, after a reconnect, and every second or so.
-- ARGV: '', stream, consumer, count, lease in milliseconds (-1: others' entries are left alone), pause between looks in
--   seconds, earliest and latest time of this server that the caller expects (empty: any), count from which an entry is
--   suspect, the most suspects at once, poison limit, then the entries that this consumer has in work.
-- Changes: entries of others whose lease has lapsed become this consumer's, count + 1. Suspects are worked without other
--   entries: at first several at once, a quarter as many after each further loss, in the end one. An entry past the limit
--   that was lost in isolation (isolate) is to blame; it is taken only to be buried. Only this counts a delivery: Redis's
--   own count grows with every look. Who took a sample first, and who lost it when, is noted in its group.
-- One look at all pending entries serves every consumer: within a pause after it others are answered without one, unless
--   it found more than its caller could take (leases, field <stream>).
-- Leases are measured with the server's clock. A time outside what the caller expects is a step of that clock: for one
--   lease nothing is taken from others (leases, field stepped), and leases that seem to begin in the future begin now.
-- Returns: time of this server, then {entry, deliveries, to blame (1 or 0)} of at most `count`: first those pending for this consumer that
--   it does not work on (a reply that was lost). Their payloads are read apart: all together may not arrive in time.
local name, consumer, wanted, lease = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local pause, earliest, latest = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local suspect_from, most_suspects, limit = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local stream, reader, working, taken = prefix .. name, readers[name], {}, {}
local looks, most = prefix .. 'leases', 10000
local suspects, room = 0, most_suspects
for i = 12, #ARGV do working[ARGV[i]] = true end

-- How many suspects this consumer may have with one more; the one that was lost most often decides.
local function room_with(deliveries)
  return math.min(room, math.max(1, math.floor(most_suspects / 4 ^ (deliveries - suspect_from))))
end

local function add_suspect(deliveries)
  suspects, room = suspects + 1, room_with(deliveries)
end

-- Whether an entry has lost too many workers, the last of them in isolation.
local function to_blame(about, entry, deliveries)
  local isolated = deliveries > limit and about[1]
    and redis.call('HGET', prefix .. 'group:' .. about[1], 'isolated:' .. entry)
  return isolated and isolated ~= '' and isolated ~= consumer and 1 or 0
end

-- The words of an entry's first field: group, and of a sample its index; nil where there is no such entry any more.
local function found(entry)
  local row = redis.call('XRANGE', stream, entry, entry)[1]
  if not row then redis.call('XACK', stream, reader, entry) end
  return row and words(row[2][2])
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
    redis.call('HSET', looks, 'stepped', now_text)
    count('clock_steps')
  end
  local stepped = tonumber(redis.call('HGET', looks, 'stepped') or '-inf')
  if stepped <= now and now - stepped < lease / 1000 then return false end
  local last = tonumber(redis.call('HGET', looks, name) or '-inf')
  return pause == 0 or last > now or now - last >= pause
end

for _, entry in ipairs(redis.call('XPENDING', stream, reader, '-', '+', wanted + #ARGV, consumer)) do
  local new = not working[entry[1]] and #taken < wanted
  local about = new and found(entry[1])
  local blamed = about and to_blame(about, entry[1], entry[4]) or 0
  if entry[4] >= suspect_from and blamed == 0 then add_suspect(entry[4]) end
  if about then taken[#taken + 1] = {entry[1], entry[4], blamed} end
end
if due() then
  for _, entry in ipairs(redis.call('XPENDING', stream, reader, 'IDLE', lease, '-', '+', most)) do
    local deliveries = entry[4] + 1
    local held = entry[2] == consumer or working[entry[1]]  -- lost and not yet told so: its next renewal comes first
    local about = #taken < wanted and not held and found(entry[1])
    local blamed = about and to_blame(about, entry[1], deliveries) or 0
    local suspect = deliveries >= suspect_from and blamed == 0
    if about and (not suspect or suspects < room_with(deliveries)) then
      redis.call('XCLAIM', stream, reader, consumer, 0, entry[1], 'RETRYCOUNT', deliveries, 'JUSTID')
      taken[#taken + 1] = {entry[1], deliveries, blamed}
      if suspect then
        add_suspect(deliveries)
        note_isolated(about[1], entry[1], '')
      end
      if deliveries > 1 then
        count('redelivered:' .. name)
        if name == 'samples' and about[2] then note_first(about[1], about[2], entry[3] / 1000, entry[2]) end
        if about[1] then note_loss(about[1], entry[1], entry[3] / 1000, entry[2]) end
      end
    end
  end
  if pause > 0 and #taken < wanted then
    redis.call('HSET', looks, name, now_text)
  else
    redis.call('HDEL', looks, name)
  end
end
table.insert(taken, 1, now_text)
return taken
