/* SPDX-License-Identifier: Apache-2.0 */
/* A numbered stream of datagrams at a fixed rate, and a receiver that says which ones are missing.
 *   traffic send ADDRESS PORT SOURCE_PORT RATE SECONDS SIZE
 *   traffic receive PORT SECONDS
 * Both print one JSON object. The receiver first prints "ready". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int sender(char **argument)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(atoi(argument[1])) };
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_port = htons(atoi(argument[2])) };
	double rate = atof(argument[3]), seconds = atof(argument[4]);
	size_t size = atoi(argument[5]);
	static char body[9000];
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	inet_pton(AF_INET, argument[0], &to.sin_addr);
	if (size < 16 || size > sizeof body || bind(s, (void *)&from, sizeof from) || connect(s, (void *)&to, sizeof to))
		return 1;
	uint64_t sent = 0, late = 0, refused = 0, begin = now(), end = begin + (uint64_t)(seconds * 1e9);
	for (;;) {
		uint64_t due = begin + (uint64_t)(sent * 1e9 / rate), t = now();
		if (t >= end)
			break;
		if (t < due) {
			if (due - t > 80000) {
				struct timespec rest = { 0, due - t - 60000 };
				nanosleep(&rest, 0);
			}
			continue;
		}
		late += t - due > 2000000;
		memcpy(body, &sent, 8);
		refused += send(s, body, size, 0) < 0;
		sent++;
	}
	printf("{\"sent\": %lu, \"late\": %lu, \"refused\": %lu}\n", sent, late, refused);
	return 0;
}

#define MOST 8000000
static int receiver(char **argument)
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(atoi(argument[0])) };
	struct timeval patience = { 0, 100000 };
	int s = socket(AF_INET, SOCK_DGRAM, 0), room = 64 << 20;
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
	if (bind(s, (void *)&here, sizeof here))
		return 1;
	static uint8_t seen[MOST];
	static char body[9000];
	uint64_t received = 0, twice = 0, reordered = 0, newest = 0, last = 0, gap = 0;
	puts("ready");
	fflush(stdout);
	uint64_t end = now() + (uint64_t)(atof(argument[1]) * 1e9);
	while (now() < end) {
		uint64_t number, t;
		if (recv(s, body, sizeof body, 0) < 16)
			continue;
		memcpy(&number, body, 8);
		t = now();
		if (number >= MOST)
			continue;
		if (seen[number]++) {
			twice++;
			continue;
		}
		received++;
		if (number < newest)
			reordered++;
		else
			newest = number;
		if (last && t - last > gap)
			gap = t - last;
		last = t;
	}
	printf("{\"received\": %lu, \"duplicates\": %lu, \"reordered\": %lu, \"longest_gap\": %.9f}\n", received, twice,
	       reordered, gap / 1e9);
	return 0;
}

int main(int count, char **argument)
{
	if (count == 8 && !strcmp(argument[1], "send"))
		return sender(argument + 2);
	if (count == 4 && !strcmp(argument[1], "receive"))
		return receiver(argument + 2);
	return 2;
}
