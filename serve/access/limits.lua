-- Shares one API key's limits among gateways: reads what all of them report, replaces the caller's
-- report, and grants it a lease. A report is absolute, so repeating or losing a call changes nothing.
--
-- KEYS[1] is a hash with one field per gateway process:
--   "1 <until> <day> <spent> <held> <flight> <moment>:<requests>:<tokens> ..."
-- until: when requests in flight and held tokens lapse, unless reported again. spent: tokens of
-- <day> (days since 1970). held: tokens of requests in flight and of the lease. The moments are the
-- use of the last minute; a lease counts at the last moment at which it may be used. Times are
-- milliseconds since 1970 by the server's clock; a caller sends only ages.
--
-- KEYS[2] is a hash of the tokens of `day` by processes that have ended, or not reported for a
-- minute: "day", their sum as "all", and one field per process. Their fields leave KEYS[1], which
-- every call reads whole. A process that reports again leaves KEYS[2].
--
-- Returns {now, verdict, wait, requests, tokens, and of the others: requests, tokens, tokens of the
-- day, requests in flight, how many are alive}.
local WINDOW, DAY = 60000, 86400000
local GRANTED, REQUESTS, TOKENS, QUOTA, FLIGHT = 0, 1, 2, 3, 4

local replica, history = ARGV[1], ARGV[2]
local n = {}
for i = 3, #ARGV do n[i] = tonumber(ARGV[i]) end
local keep_ms, lease_ms = n[3], n[4]
local max_requests, max_tokens, max_day, max_flight = n[5], n[6], n[7], n[8] -- -1: no limit
local day, spent, held, flight = n[9], n[10], n[11], n[12]
local wanted, wanted_tokens = n[13], n[14] -- 1 and its tokens: a request waits; 0 and 0: none
local more_requests, more_tokens = n[15], n[16] -- beyond that, if there are any left

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local today = math.floor(now / DAY)
local used = {} -- {moment, requests, tokens}
local sums = {0, 0}

local function add(moment, requests, tokens)
  if moment > now - WINDOW and moment < now + WINDOW then
    used[#used + 1] = {moment, requests, tokens}
    sums[1], sums[2] = sums[1] + requests, sums[2] + tokens
  end
end

local quiet = redis.call('HMGET', KEYS[2], 'day', 'all', replica)
local quiet_day, quiet_tokens, quiet_own = tonumber(quiet[1]), tonumber(quiet[2]), quiet[3]
if not (quiet_day and quiet_tokens) and redis.call('EXISTS', KEYS[2]) == 1 then
  return redis.error_reply('FOREIGN ' .. KEYS[2])
end
local ended = quiet_day and quiet_day < today
if ended or not quiet_day then quiet_day, quiet_tokens, quiet_own = today, 0, false end
quiet_tokens = quiet_tokens - (tonumber(quiet_own) or 0)

local others_day, others_flight, alive = quiet_tokens, 0, 0
local gone, gone_tokens = {}, {}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local lapses, of_day, of_spent, of_held, of_flight, moments =
    string.match(fields[i + 1], '^1 (%d+) (%d+) (%d+) (%d+) (%d+) ?([%d: ]*)$')
  if not lapses then
    return redis.error_reply('FOREIGN ' .. KEYS[1])
  end
  if fields[i] ~= replica then
    for moment, requests, tokens in string.gmatch(moments, '(%d+):(%d+):(%d+)') do
      add(tonumber(moment), tonumber(requests), tonumber(tokens))
    end
    if tonumber(of_day) < today then of_spent = 0 end
    others_day = others_day + of_spent
    if tonumber(lapses) > now then
      others_day, others_flight = others_day + of_held, others_flight + of_flight
      alive = alive + 1
    elseif tonumber(lapses) + WINDOW < now then
      gone_tokens[#gone_tokens + 1] = tonumber(of_spent)
      gone[#gone + 1] = fields[i]
    end
  end
end
local others_requests, others_tokens = sums[1], sums[2]

local report = {}
local function note(moment, requests, tokens)
  report[#report + 1] = string.format('%.0f:%.0f:%.0f', moment, requests, tokens)
end
for age, requests, tokens in string.gmatch(history, '(%d+):(%d+):(%d+)') do
  local moment = now - tonumber(age)
  add(moment, tonumber(requests), tonumber(tokens))
  note(moment, tonumber(requests), tonumber(tokens))
end
if day < today then spent = 0 end -- the day has turned since; a later day is a wrong clock's

-- Returns the time until column `of` of what is used has fallen by `excess`.
local function wait_for(of, excess)
  table.sort(used, function(a, b) return a[1] < b[1] end)
  for _, entry in ipairs(used) do
    excess = excess - entry[of]
    if excess <= 0 then return entry[1] + WINDOW - now end
  end
  return WINDOW
end

local function left(limit, taken)
  return limit < 0 and math.huge or limit - taken
end
local left_requests = left(max_requests, sums[1])
local left_tokens = left(max_tokens, sums[2])
local left_day = left(max_day, others_day + spent + held)

local verdict, wait, requests, tokens = GRANTED, 0, 0, 0
if wanted > 0 and others_flight + flight >= max_flight and max_flight >= 0 then
  verdict = FLIGHT
elseif wanted > 0 and wanted > left_requests then
  verdict, wait = REQUESTS, wait_for(2, wanted - left_requests)
elseif wanted > 0 and wanted_tokens > left_tokens then
  verdict, wait = TOKENS, wait_for(3, wanted_tokens - left_tokens)
elseif wanted > 0 and wanted_tokens > left_day then
  verdict = QUOTA
else
  requests = math.max(math.min(wanted + more_requests, left_requests), 0)
  tokens = math.max(math.min(wanted_tokens + more_tokens, left_tokens, left_day), 0)
  flight, held = flight + wanted, held + tokens
  if requests + tokens > 0 then note(now + lease_ms, requests, tokens) end
end

redis.call('HSET', KEYS[1], replica, string.format('1 %.0f %.0f %.0f %.0f %.0f %s',
  now + keep_ms, today, spent, held, flight, table.concat(report, ' ')))
redis.call('PEXPIRE', KEYS[1], 2 * DAY)
if ended then redis.call('DEL', KEYS[2]) end
if quiet_own then redis.call('HDEL', KEYS[2], replica) end
for i, process in ipairs(gone) do
  quiet_tokens = quiet_tokens + gone_tokens[i]
  if gone_tokens[i] > 0 then redis.call('HSET', KEYS[2], process, gone_tokens[i]) end
  redis.call('HDEL', KEYS[1], process)
end
if quiet_own or quiet_tokens > 0 and #gone > 0 then
  redis.call('HSET', KEYS[2], 'day', quiet_day, 'all', string.format('%.0f', quiet_tokens))
  redis.call('PEXPIRE', KEYS[2], 2 * DAY)
end
return {now, verdict, wait, requests, tokens, others_requests, others_tokens, others_day,
  others_flight, alive}
