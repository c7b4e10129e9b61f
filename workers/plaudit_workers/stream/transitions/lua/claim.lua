#!lua flags=allow-oom
-- Takes entries that were delivered already. By: any consumer, on start, after a reconnect, and every second or so.
-- ARGV: '', stream, consumer, count, lease in milliseconds (-1: others' entries are left alone), count from which an
--   entry is worked alone, poison limit, then the entries that this consumer has in work.
-- Changes: (1) entries pending for this consumer that it does not work on (a reply that was lost) get a new lease and
--   keep their count; (2) entries of others whose lease has lapsed become this consumer's, count + 1. Of those to be
--   worked alone it has at most one; those past the limit, which are only to be buried, apart. Only (2) counts a
--   delivery: Redis's own count grows with every look. Who took a sample first, and who lost it when, is noted in its
--   group.
-- Returns: {entry, deliveries, fields} of at most `count`; a repeat returns the same, as (1).
local name, consumer, wanted, lease = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local alone_from, limit, suspects = tonumber(ARGV[6]), tonumber(ARGV[7]), 0
local stream, reader, working, taken = prefix .. name, readers[name], {}, {}
for i = 8, #ARGV do working[ARGV[i]] = true end

local function suspect(deliveries)
  return deliveries >= alone_from and deliveries <= limit
end

local function take(entry, deliveries)
  local found = redis.call('XRANGE', stream, entry, entry)
  if not found[1] then
    redis.call('XACK', stream, reader, entry)
    return nil
  end
  redis.call('XCLAIM', stream, reader, consumer, 0, entry, 'RETRYCOUNT', deliveries, 'JUSTID')
  taken[#taken + 1] = {entry, deliveries, found[1][2]}
  return found[1][2]
end

for _, entry in ipairs(redis.call('XPENDING', stream, reader, '-', '+', wanted + #ARGV, consumer)) do
  if suspect(entry[4]) then suspects = suspects + 1 end
  if #taken < wanted and not working[entry[1]] then take(entry[1], entry[4]) end
end
for _, entry in ipairs(lease >= 0 and redis.call('XPENDING', stream, reader, 'IDLE', lease, '-', '+', 10000) or {}) do
  local deliveries = entry[4] + 1
  local held = entry[2] == consumer or working[entry[1]]  -- lost and not yet told so: its next renewal comes first
  if #taken < wanted and not held and not (suspect(deliveries) and suspects > 0) then
    local fields = take(entry[1], deliveries)
    if fields and suspect(deliveries) then suspects = suspects + 1 end
    if fields and deliveries > 1 then
      count('redelivered:' .. name)
      local about = words(fields[2])
      if name == 'samples' then note_first(about[1], about[2], entry[3] / 1000, entry[2]) end
      note_loss(about[1], entry[1], entry[3] / 1000, entry[2])
    end
  end
end
return taken
